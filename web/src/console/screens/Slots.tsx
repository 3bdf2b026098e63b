// Slots: how full the windows of a config are, in a heat map to zoom, what a window has, and where a load would go.
import { useMemo, useState } from 'react';
import type { FormEvent, KeyboardEvent } from 'react';
import type { Page, Slot, SlotConfig, SlotWindow } from '../api';
import { ApiFailure, withQuery } from '../api';
import { count, isoMs, isoSpan, percent, plural, span, time } from '../format';
import { go, to, usePlace, useResource, useSession } from '../hooks';
import { Act, Choice, Definition, Empty, Field, Loaded, Panel, Problem, Scroll, Tag } from '../ui';

/** Cells of a map at most: a cell is one window, or several that are shown as one. */
export const CELLS_MAX = 480;
const WINDOWS_MAX = 4000;
const PER_ROW = 60;

export function SlotsScreen() {
  const { api } = useSession();
  const configs = useResource('configs', () => api.get<Page<SlotConfig>>('/admin/rate-limit/config?limit=1000'), 10_000);
  return (
    <>
      <h1>Slots</h1>
      <Loaded resource={configs} what="slot configs">
        {({ items }) => {
          const active = items.filter((config) => config.active);
          return active.length === 0 ? (
            <Empty title="There is no slot config yet.">
              <p>
                A config says how many events each window of time takes. <a href="#/start">First steps</a> has a line to copy.
              </p>
            </Empty>
          ) : (
            <Config configs={active} />
          );
        }}
      </Loaded>
    </>
  );
}

const ZOOMS = [1, 4, 16, 64] as const;

function Config({ configs }: { configs: SlotConfig[] }) {
  const { name, query } = usePlace();
  const config = configs.find((one) => one.configName === name) ?? configs[0];
  if (config === undefined) return null;
  const zoom = Number(query.get('zoom') ?? 1);
  const from = query.get('from');
  const open = query.get('window');
  const set = (change: Record<string, string | null>) => go(to('slots', config.configName, { zoom: query.get('zoom'), from, window: open, ...change }));
  return (
    <>
      <div className="row-form">
        <Field label="Config" value={config.configName} onChange={(next) => go(to('slots', next))} options={configs.map((one) => one.configName)} />
        <p className="row-fact">
          {plural(config.maxPerWindow, 'event')} in each window of {isoSpan(config.windowSize)}, version {config.version}
        </p>
      </div>
      <Heat config={config} zoom={zoom} from={from} open={open} set={set} />
      {open !== null && <Window config={config} start={open} onClose={() => set({ window: null })} />}
      <Forecast key={config.configName} config={config} />
    </>
  );
}

export interface Cell {
  start: number;
  windows: number;
  taken: number;
  room: number;
}

/** The windows in cells of `size` windows each, from `from` on. Windows that nobody asked for are empty. */
export function cellsOf(windows: SlotWindow[], from: number, windowMs: number, size: number, cells: number, maxPerWindow: number): Cell[] {
  const made: Cell[] = Array.from({ length: cells }, (_, at) => ({ start: from + at * size * windowMs, windows: 0, taken: 0, room: size * maxPerWindow }));
  for (const window of windows) {
    const cell = made[Math.floor((Date.parse(window.windowStart) - from) / (size * windowMs))];
    if (cell === undefined) continue;
    cell.windows += 1;
    cell.taken += window.slotCount;
    cell.room += window.maxPerWindow - maxPerWindow;
  }
  return made;
}

/** 0 for none, then fifths of the room, and 6 for full. */
export function heat({ taken, room }: Pick<Cell, 'taken' | 'room'>): number {
  if (taken === 0) return 0;
  return taken >= room ? 6 : 1 + Math.floor((taken / room) * 5);
}

interface HeatProps {
  config: SlotConfig;
  zoom: number;
  from: string | null;
  open: string | null;
  set(change: Record<string, string | null>): void;
}

async function readWindows(get: (path: string) => Promise<Page<SlotWindow>>, configName: string, from: number, until: number): Promise<{ windows: SlotWindow[]; partial: boolean }> {
  const windows: SlotWindow[] = [];
  let cursor: string | null = null;
  do {
    const page: Page<SlotWindow> = await get(withQuery('/api/v1/slots/windows', { configName, from: new Date(from).toISOString(), to: new Date(until).toISOString(), limit: 1000, cursor }));
    windows.push(...page.items);
    cursor = page.nextCursor;
  } while (cursor !== null && windows.length < WINDOWS_MAX);
  return { windows, partial: cursor !== null };
}

function Heat({ config, zoom, from, open, set }: HeatProps) {
  const { api } = useSession();
  const windowMs = isoMs(config.windowSize) ?? 60_000;
  const size = ZOOMS.includes(zoom as (typeof ZOOMS)[number]) ? zoom : 1;
  const cells = Math.min(CELLS_MAX, Math.floor(WINDOWS_MAX / size / PER_ROW) * PER_ROW) || PER_ROW;
  const width = cells * size * windowMs;
  const aligned = (at: number) => Math.floor(at / windowMs) * windowMs;
  const [now] = useState(() => Date.now());
  const start = from === null ? aligned(now) - 2 * PER_ROW * size * windowMs : aligned(Date.parse(from));
  const resource = useResource(`windows ${config.configName} ${start} ${size}`, () => readWindows((path) => api.get(path), config.configName, start, start + width), 5000);
  const move = (share: number) => set({ from: new Date(start + share * width).toISOString(), window: null });
  return (
    <Panel
      title="Windows by how full they are"
      aside={
        <>
          <button type="button" className="button" onClick={() => move(-0.5)}>
            Earlier
          </button>
          <button type="button" className="button" onClick={() => set({ from: null, window: null })}>
            Now
          </button>
          <button type="button" className="button" onClick={() => move(0.5)}>
            Later
          </button>
          <Choice label="Zoom" value={String(size)} onChange={(next) => set({ zoom: next === '1' ? null : next, window: null })} options={ZOOMS.map((one) => [String(one), one === 1 ? 'each' : `${one} as 1`] as const)} />
        </>
      }
    >
      <Loaded resource={resource} what="windows">
        {({ windows, partial }) => (
          <>
            <Grid cells={cellsOf(windows, start, windowMs, size, cells, config.maxPerWindow)} windowMs={windowMs} size={size} now={now} open={open} onOpen={(cell) => (size === 1 ? set({ window: new Date(cell.start).toISOString() }) : set({ zoom: size === 4 ? null : String(size / 4), from: new Date(cell.start - (cells / 2) * (size / 4) * windowMs).toISOString(), window: null }))} />
            <p className="note">
              {plural(windows.reduce((sum, one) => sum + one.slotCount, 0), 'event')} in {plural(windows.length, 'window')} that have any, {plural(windows.filter((one) => one.slotCount >= one.maxPerWindow).length, 'full one')}
              {partial && '; only the first windows are shown, zoom in'}. {size === 1 ? 'Open a window to see its events.' : 'Open a cell to zoom in.'}
            </p>
          </>
        )}
      </Loaded>
    </Panel>
  );
}

function Grid({ cells, windowMs, size, now, open, onOpen }: { cells: Cell[]; windowMs: number; size: number; now: number; open: string | null; onOpen(cell: Cell): void }) {
  const rows = useMemo(() => {
    const made: Cell[][] = [];
    for (let at = 0; at < cells.length; at += PER_ROW) made.push(cells.slice(at, at + PER_ROW));
    return made;
  }, [cells]);
  const [at, setAt] = useState(2 * PER_ROW);
  function onKey(event: KeyboardEvent<HTMLTableElement>): void {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -PER_ROW, ArrowDown: PER_ROW };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.min(cells.length - 1, Math.max(0, at + step));
    setAt(next);
    event.currentTarget.querySelector<HTMLButtonElement>(`[data-at="${next}"]`)?.focus();
  }
  const focused = Math.min(at, cells.length - 1);
  return (
    <div className="heat-scroll">
      <table className="heat" onKeyDown={onKey}>
        <colgroup>
          <col className="heat-times" />
        </colgroup>
        <caption className="unseen">Windows by how full they are; arrow keys move between them</caption>
        <tbody>
          {rows.map((row, line) => (
            <tr key={row[0]?.start}>
              <th scope="row">{time(row[0]?.start)}</th>
              {row.map((cell, column) => {
                const index = line * PER_ROW + column;
                const isNow = now >= cell.start && now < cell.start + size * windowMs;
                const words = `${time(cell.start)}: ${count(cell.taken)} of ${count(cell.room)}, ${Math.round(percent(cell.taken, cell.room))} %${isNow ? ', now' : ''}`;
                return (
                  <td key={cell.start}>
                    <button type="button" className="heat-cell" data-heat={heat(cell)} data-now={isNow || undefined} data-at={index} aria-label={words} title={words} aria-pressed={open !== null && Date.parse(open) === cell.start} tabIndex={index === focused ? 0 : -1} onFocus={() => setAt(index)} onClick={() => onOpen(cell)} />
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
      <p className="heat-key" aria-hidden="true">
        empty
        {[0, 1, 2, 3, 4, 5, 6].map((level) => (
          <i key={level} className="heat-cell" data-heat={level} />
        ))}
        full · a row is {span(PER_ROW * size * windowMs)}
      </p>
    </div>
  );
}

function Window({ config, start, onClose }: { config: SlotConfig; start: string; onClose(): void }) {
  const { api } = useSession();
  const path = withQuery('/api/v1/slots', { configName: config.configName, windowStart: start, limit: 200 });
  const slots = useResource(path, () => api.get<Page<Slot>>(path), 5000);
  return (
    <Panel title={`Window of ${time(start)}`} aside={<button type="button" className="button" onClick={onClose}>Close</button>}>
      <Loaded resource={slots} what="its events">
        {({ items, nextCursor }) =>
          items.length === 0 ? (
            <Empty title="No event has a place here." />
          ) : (
            <>
              <Scroll label="Events of this window">
                <table className="grid">
                  <thead>
                    <tr>
                      <th scope="col">Event</th>
                      <th scope="col">Asked for</th>
                      <th scope="col">Scheduled</th>
                    </tr>
                  </thead>
                  <tbody>
                    {items.map((slot) => (
                      <tr key={slot.eventId}>
                        <th scope="row">{slot.eventId}</th>
                        <td>{time(slot.requestedTime)}</td>
                        <td>{time(slot.scheduledTime)}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </Scroll>
              {nextCursor !== null && <p className="note">The first {count(items.length)} are shown.</p>}
            </>
          )
        }
      </Loaded>
    </Panel>
  );
}

interface Answer {
  events: number;
  windows: number;
  firstWindow: string;
  lastWindow: string;
  finishesBy: string;
}

/** Where a load would go, before it is sent. Nothing is taken. */
function Forecast({ config }: { config: SlotConfig }) {
  const { api, readOnly } = useSession();
  const [events, setEvents] = useState('10000');
  const [at, setAt] = useState('');
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [failure, setFailure] = useState<ApiFailure | null>(null);
  async function ask(event: FormEvent): Promise<void> {
    event.preventDefault();
    setFailure(null);
    try {
      const requestedTime = (at === '' ? new Date() : new Date(at)).toISOString();
      setAnswer(await api.send<Answer>('POST', '/api/v1/slots/forecast', { configName: config.configName, requestedTime, events: Number(events) }));
    } catch (error) {
      setAnswer(null);
      setFailure(error instanceof ApiFailure ? error : new ApiFailure(0, 'INVALID', 'Enter a number and a time.'));
    }
  }
  return (
    <Panel title="Forecast of a load" aside={<span className="faint">takes nothing</span>}>
      <form className="row-form" onSubmit={(event) => void ask(event)}>
        <Field label="Events" type="number" value={events} onChange={setEvents} required />
        <Field label="From" type="datetime-local" value={at} onChange={setAt} hint="now, if it is empty" />
        <Act type="submit" tone="primary">
          Forecast
        </Act>
      </form>
      {readOnly && <p className="note">A forecast is a POST, which a token with admin:read may not send.</p>}
      {failure && <Problem failure={failure} />}
      <div role="status">
        {answer && (
          <Definition
            rows={[
              ['Done by', <b key="d">{time(answer.finishesBy)}</b>],
              ['Takes', span(Date.parse(answer.finishesBy) - Date.parse(answer.firstWindow))],
              ['Windows', `${count(answer.windows)}, from ${time(answer.firstWindow)} to ${time(answer.lastWindow)}`],
              ['Events', <Tag key="e" tone="info">{count(answer.events)}</Tag>],
            ]}
          />
        )}
      </div>
    </Panel>
  );
}

