// Now: what is decided, what waits, what is wrong, and who is near a limit. Live.
import { useMemo, useState } from 'react';
import { Chart, Spark, thin } from '../chart';
import type { Line } from '../chart';
import { count, latency, limitWords, plural, short, span } from '../format';
import { to, useLive, useNow, useResource, useSession } from '../hooks';
import { recent } from '../live';
import type { LiveState, Ring } from '../live';
import { Choice, Empty, Loaded, Loading, Panel, Scroll, Tag, Turning, Usage } from '../ui';

export const CAPABILITIES = ['quota', 'slot', 'request', 'tier', 'sale'] as const;
type Capability = (typeof CAPABILITIES)[number];

const ABOUT: Record<Capability, string> = {
  quota: 'messages per user',
  slot: 'places in time',
  request: 'calls of downstreams',
  tier: 'plans and policies',
  sale: 'units of stock',
};

/** Rates are means of so many seconds: long enough to read, short enough to be now. */
const RATE_SECONDS = 5;

export function NowScreen() {
  const live = useLive();
  if (live.snapshot === null) return <Loading what="what happens now" />;
  return (
    <>
      <h1 className="unseen">Now</h1>
      <Attention live={live} />
      <Capabilities live={live} />
      <div className="columns">
        <Decisions live={live} />
        {live.hello?.knowsServers && <AllServers />}
        <NearLimits live={live} />
        <Engines live={live} />
        <Backlog live={live} />
      </div>
    </>
  );
}

interface Alarm {
  tone: 'bad' | 'warn';
  words: string;
  href: string;
  look: string;
}

/** What an operator should look at first, worst first, each with the way to the answer. */
export function alarms({ snapshot, seconds }: LiveState, now: number): Alarm[] {
  if (snapshot === null) return [];
  const found: Alarm[] = [];
  for (const engine of snapshot.engines.filter((one) => !one.up)) {
    const reason = engine.reason ? `: ${engine.reason}` : '';
    found.push({ tone: 'bad', words: `${engine.name} has been down for ${span(now - Date.parse(engine.since))}${reason}`, href: '#/now', look: 'Engines' });
  }
  for (const capability of snapshot.capabilities.filter((one) => !one.ready)) {
    found.push({ tone: 'bad', words: `${capability.name} cannot be served: ${capability.reason ?? 'not ready'}`, href: '#/now', look: 'Engines' });
  }
  for (const name of CAPABILITIES) {
    const failed = recent(seconds, `${name}.failed`, 60).sum;
    if (failed > 0) found.push({ tone: 'bad', words: `${plural(failed, 'call')} of ${name} failed in the last minute`, href: '#/now', look: 'Decisions' });
  }
  for (const downstream of snapshot.backlog?.downstreams ?? []) {
    const name = downstream.name === '' ? 'the default downstream' : downstream.name;
    const href = to('requests', null, { downstream: downstream.name === '' ? null : downstream.name });
    if (downstream.breaker === 'open') {
      found.push({ tone: 'bad', words: `The breaker of ${name} is open: ${plural(downstream.waiting + downstream.parked, 'request')} wait`, href, look: 'Requests' });
    } else if ((downstream.oldestWaitingSeconds ?? 0) > 10) {
      found.push({ tone: 'warn', words: `${plural(downstream.waiting, 'request')} wait for ${name}, the first for ${span((downstream.oldestWaitingSeconds ?? 0) * 1000)}`, href, look: 'Requests' });
    }
  }
  const dead = (snapshot.backlog?.deadRequests ?? 0) + Object.values(snapshot.backlog?.deadLetters ?? {}).reduce((sum, one) => sum + one, 0);
  if (dead > 0) found.push({ tone: 'warn', words: `${plural(dead, 'dead letter')} wait for a decision`, href: '#/dead', look: 'Dead letters' });
  if (snapshot.backlog === null && snapshot.engines.every((one) => one.up)) {
    found.push({ tone: 'warn', words: 'The backlog could not be read', href: '#/now', look: 'Backlog' });
  }
  return found;
}

function Attention({ live }: { live: LiveState }) {
  const now = useNow();
  const found = alarms(live, now);
  const isUnused = live.minutes.steps.length > 0 && CAPABILITIES.every((name) => (live.minutes.series[`${name}.allowed`] ?? []).every((one) => one === 0));
  return (
    <section className="attention" aria-label="What needs attention">
      {found.length === 0 ? (
        <p className="attention-none">
          <i aria-hidden="true" />
          Nothing needs attention.
          {isUnused && (
            <>
              {' '}
              Nothing has been decided yet either: <a href="#/start">first steps</a>.
            </>
          )}
        </p>
      ) : (
        <ul>
          {found.map((alarm) => (
            <li key={alarm.words} data-tone={alarm.tone}>
              <span>{alarm.words}</span>
              {alarm.href !== '#/now' && <a href={alarm.href}>{alarm.look}</a>}
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function rate(ring: Ring, name: string): number {
  const { sum, steps } = recent(ring, name, RATE_SECONDS);
  return steps === 0 ? 0 : sum / steps;
}

/** The highest of the last minute: a latency that nobody had just now still counts. */
function highest(ring: Ring, name: string): number {
  const newest = ring.steps.at(-1) ?? 0;
  return (ring.series[name] ?? []).reduce((most, value, at) => (newest - (ring.steps[at] ?? 0) < 60 ? Math.max(most, value) : most), 0);
}

function Capabilities({ live }: { live: LiveState }) {
  const { seconds, snapshot } = live;
  return (
    <Panel title="Decisions by capability" aside={<span className="faint">per second, mean of {RATE_SECONDS} s · latency: highest of the last minute</span>}>
      <Scroll label="Decisions by capability">
        <table className="grid capabilities">
          <thead>
            <tr>
              <th scope="col">Capability</th>
              <th scope="col" className="number">
                Allowed/s
              </th>
              <th scope="col" className="number">
                Denied/s
              </th>
              <th scope="col" className="number">
                Failed/s
              </th>
              <th scope="col" className="number">
                Waiting
              </th>
              <th scope="col" className="number">
                p50
              </th>
              <th scope="col" className="number">
                p99
              </th>
              <th scope="col">Last 15 min</th>
              <th scope="col">State</th>
            </tr>
          </thead>
          <tbody>
            {CAPABILITIES.map((name) => {
              const state = snapshot?.capabilities.find((one) => one.name === name);
              const [allowed, denied, failed] = [rate(seconds, `${name}.allowed`), rate(seconds, `${name}.denied`), rate(seconds, `${name}.failed`)];
              const waiting = snapshot?.series[`${name}.waiting`] ?? 0;
              const all = (seconds.series[`${name}.allowed`] ?? []).map((one, at) => one + (seconds.series[`${name}.denied`]?.[at] ?? 0));
              return (
                <tr key={name}>
                  <th scope="row">
                    {name} <span className="faint wide">{ABOUT[name]}</span>
                  </th>
                  <td className="number strong">{short(allowed)}</td>
                  <td className="number" data-tone={denied > 0 ? 'warn' : undefined}>
                    {short(denied)}
                  </td>
                  <td className="number" data-tone={failed > 0 ? 'bad' : undefined}>
                    {short(failed)}
                  </td>
                  <td className="number">{short(waiting)}</td>
                  <td className="number">{latency(highest(seconds, `${name}.p50Us`))}</td>
                  <td className="number">{latency(highest(seconds, `${name}.p99Us`))}</td>
                  <td>
                    <Spark values={thin(all, 120)} label={`Decisions of ${name} in the last 15 minutes`} />
                  </td>
                  <td>{state === undefined ? <Tag>not served here</Tag> : state.ready ? <Tag tone="good">ready</Tag> : <Tag tone="bad">down</Tag>}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

type Range = 'seconds' | 'minutes';

/** Missing steps are gaps of a line, not slopes. */
export function columns(ring: Ring, names: string[], startedAt: number, stepSeconds: number): { x: number[]; values: (number | null)[] } {
  const x: number[] = [];
  const values: (number | null)[] = [];
  let last: number | null = null;
  ring.steps.forEach((step, at) => {
    if (last !== null && step - last > 2) {
      x.push(startedAt + (last + 1) * stepSeconds);
      values.push(null);
    }
    last = step;
    x.push(startedAt + step * stepSeconds);
    values.push(names.reduce((sum, name) => sum + (ring.series[name]?.[at] ?? 0), 0) / stepSeconds);
  });
  return { x, values };
}

function Decisions({ live }: { live: LiveState }) {
  const [range, setRange] = useState<Range>('seconds');
  const [of, setOf] = useState<'all' | Capability>('all');
  const ring = live[range];
  const startedAt = Date.parse(live.hello?.startedAt ?? '') / 1000;
  const { x, lines } = useMemo(() => {
    const chosen = of === 'all' ? CAPABILITIES : [of];
    const line = (kind: string, label: string, color: string, fill = false): Line & { x: number[] } => {
      const { x, values } = columns(ring, chosen.map((name) => `${name}.${kind}`), startedAt, range === 'seconds' ? 1 : 60);
      return { x, values, label, color, fill };
    };
    const lines = [line('allowed', 'allowed/s', '--accent', true), line('denied', 'denied/s', '--warn'), line('failed', 'failed/s', '--bad')];
    return { x: lines[0]?.x ?? [], lines };
  }, [ring, of, range, startedAt]);
  return (
    <Panel
      title="Decisions"
      className="wide-panel"
      aside={
        <>
          <Choice label="Capability" value={of} onChange={setOf} options={[['all', 'All'] as const, ...CAPABILITIES.map((name) => [name, name] as const)]} />
          <Choice label="Time" value={range} onChange={setRange} options={[['seconds', '15 min'] as const, ['minutes', '24 h'] as const]} />
        </>
      }
    >
      <Chart x={x} lines={lines} height={200} label={`Decisions of ${of === 'all' ? 'all capabilities' : of}, ${range === 'seconds' ? 'last 15 minutes' : 'last day'}`} />
    </Panel>
  );
}

interface Servers {
  servers: { instance: string; allowed: number; denied: number; failed: number; enginesDown: string[] }[];
  times: number[];
  series: Record<string, (number | null)[]>;
}

/** What all servers decide together, and each: as Prometheus has it, so some seconds old. */
function AllServers() {
  const { api } = useSession();
  const [range, setRange] = useState<'15m' | '24h'>('15m');
  const servers = useResource(`servers ${range}`, () => api.get<Servers>(`/admin/servers?range=${range}`), 10_000);
  return (
    <Panel title="All servers" className="wide-panel" aside={<Choice label="Time of all servers" value={range} onChange={setRange} options={[['15m', '15 min'] as const, ['24h', '24 h'] as const]} />}>
      <Loaded resource={servers} what="all servers">
        {(data) => (
          <>
            <ServersChart data={data} />
            <Scroll label="All servers">
              <table className="grid">
                <thead>
                  <tr>
                    <th scope="col">Server</th>
                    <th scope="col" className="number">
                      Allowed/s
                    </th>
                    <th scope="col" className="number">
                      Denied/s
                    </th>
                    <th scope="col" className="number">
                      Failed/s
                    </th>
                    <th scope="col">Engines</th>
                  </tr>
                </thead>
                <tbody>
                  {data.servers.map((one) => (
                    <tr key={one.instance}>
                      <th scope="row">{one.instance}</th>
                      <td className="number strong">{short(one.allowed)}</td>
                      <td className="number">{short(one.denied)}</td>
                      <td className="number" data-tone={one.failed > 0 ? 'bad' : undefined}>
                        {short(one.failed)}
                      </td>
                      <td>{one.enginesDown.length === 0 ? <Tag tone="good">up</Tag> : <Tag tone="bad">{one.enginesDown.join(', ')} down</Tag>}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </Scroll>
            {data.servers.length === 0 && <Empty title="Prometheus has no server of Weir." />}
          </>
        )}
      </Loaded>
    </Panel>
  );
}

function ServersChart({ data }: { data: Servers }) {
  const lines = useMemo(() => {
    const line = (kind: string, label: string, color: string): Line => {
      const columns = CAPABILITIES.map((name) => data.series[`${name}.${kind}`] ?? []);
      const values = data.times.map((_time, at) => {
        const known = columns.map((column) => column[at]).filter((value): value is number => typeof value === 'number');
        return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0);
      });
      return { values, label, color };
    };
    return [line('allowed', 'allowed/s', '--accent'), line('denied', 'denied/s', '--warn'), line('failed', 'failed/s', '--bad')];
  }, [data]);
  return <Chart x={data.times} lines={lines} height={160} label="Decisions of all servers" />;
}

function NearLimits({ live }: { live: LiveState }) {
  const near = live.snapshot?.nearLimits ?? [];
  return (
    <Panel title="Who is near a limit" aside={<span className="faint">half used or more, as this server has seen it</span>}>
      {near.length === 0 ? (
        <Empty title="Nobody is near a limit." />
      ) : (
        <Scroll label="Who is near a limit">
          <table className="grid">
            <thead>
              <tr>
                <th scope="col">Key</th>
                <th scope="col">Limit</th>
                <th scope="col">Used</th>
                <th scope="col" className="number">
                  Denied
                </th>
                <th scope="col">Turns</th>
              </tr>
            </thead>
            <tbody>
              {near.map((one) => (
                <tr key={`${one.capability} ${one.limitName} ${one.key}`}>
                  <th scope="row">
                    <a href={to('key', one.key)}>{one.key}</a>
                  </th>
                  <td>{limitWords(one.limitName)}</td>
                  <td className="nowrap">
                    <Usage used={one.limit - one.remaining} limit={one.limit} label={`${one.key}: used of ${limitWords(one.limitName)}`} /> {count(one.limit - one.remaining)}/{count(one.limit)}
                  </td>
                  <td className="number" data-tone={one.denials > 0 ? 'warn' : undefined}>
                    {count(one.denials)}
                  </td>
                  <td className="nowrap">
                    <Turning endsAt={one.until === null ? null : Date.parse(one.until)} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </Panel>
  );
}

function Engines({ live }: { live: LiveState }) {
  const { snapshot, hello } = live;
  const now = useNow();
  return (
    <Panel title="Engines" aside={<span className="faint">{hello?.roles.join(', ')}</span>}>
      <table className="grid">
        <thead>
          <tr>
            <th scope="col">Engine</th>
            <th scope="col">State</th>
            <th scope="col" className="number">
              Answers in
            </th>
            <th scope="col">Since</th>
          </tr>
        </thead>
        <tbody>
          {snapshot?.engines.map((engine) => (
            <tr key={engine.name}>
              <th scope="row">{engine.name}</th>
              <td>
                {engine.up ? <Tag tone="good">up</Tag> : <Tag tone="bad">down</Tag>} {engine.reason}
              </td>
              <td className="number">{latency(engine.latencyMs * 1000)}</td>
              <td className="nowrap">{span(now - Date.parse(engine.since))}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p className="note">
        {plural(snapshot?.connections ?? 0, 'connection')}, {plural(snapshot?.streams ?? 0, 'stream or long poll', 'streams and long polls')}, up for{' '}
        {span(now - Date.parse(hello?.startedAt ?? ''))}.{hello?.sharedStore && ' Other servers may use the same store; this page is about this one.'}
      </p>
    </Panel>
  );
}

function Backlog({ live }: { live: LiveState }) {
  const backlog = live.snapshot?.backlog ?? null;
  if (backlog === null) {
    return (
      <Panel title="Backlog of requests">
        <Empty title="The store does not say." />
      </Panel>
    );
  }
  return (
    <Panel title="Backlog of requests" aside={<a href="#/requests">Requests</a>}>
      <Scroll label="Backlog of requests">
        <table className="grid">
          <thead>
            <tr>
              <th scope="col">Downstream</th>
              <th scope="col" className="number">
                Waiting
              </th>
              <th scope="col" className="number">
                Running
              </th>
              <th scope="col" className="number">
                Parked
              </th>
              <th scope="col">Longest wait</th>
              <th scope="col">Breaker</th>
            </tr>
          </thead>
          <tbody>
            {backlog.downstreams.map((one) => (
              <tr key={one.name}>
                <th scope="row">{one.name === '' ? 'default' : one.name}</th>
                <td className="number strong">{count(one.waiting)}</td>
                <td className="number">{count(one.running)}</td>
                <td className="number">{count(one.parked)}</td>
                <td>{one.oldestWaitingSeconds === null ? '–' : span(one.oldestWaitingSeconds * 1000)}</td>
                <td>{one.breaker === null ? '–' : <Tag tone={one.breaker === 'closed' ? 'good' : one.breaker === 'open' ? 'bad' : 'warn'}>{one.breaker === 'halfOpen' ? 'half-open' : one.breaker}</Tag>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <p className="note">
        {plural(backlog.deadRequests, 'dead request')}
        {Object.entries(backlog.deadLetters).map(([topic, dead]) => (
          <span key={topic}>
            {' · '}
            {topic}: {dead >= 10_000 ? '10,000 or more' : count(dead)}
          </span>
        ))}
        {backlog.oldestPendingSeconds > 0 && <span> · the broker lacks requests of {span(backlog.oldestPendingSeconds * 1000)} ago</span>}
      </p>
    </Panel>
  );
}
