// Keeps the page's view of the sale current: a status answer first, then the event stream, and polling whenever the
// stream is down. The stream resumes from the last event it saw and is given up when its heartbeats stop.
import type { Api } from './api';
import { backoff, spread } from './backoff';
import type { BackoffLimits } from './backoff';
import type { ServerClock } from './clock';
import { decodeEvent } from './contract';
import { withEvent, withStatus } from './sale';
import type { SaleView } from './sale';
import { createParser } from './sse';
import { createStore } from './store';
import type { Store } from './store';

export type Link = 'connecting' | 'live' | 'polling' | 'offline';

export interface FeedState {
  /** `none`: the server knows no such sale. */
  phase: 'loading' | 'none' | 'sale';
  view: SaleView | null;
  link: Link;
}

export interface FeedOptions {
  api: Api;
  clock: ServerClock;
  /** The sale to follow; `null` follows the current one. */
  sku: string | null;
  random?: () => number;
}

export interface Feed {
  state: Store<FeedState>;
  /** Try now: the network is back, the tab is looked at again, or a purchase showed that our view is old. */
  wake(): void;
  stop(): void;
}

export const POLL_MS = 2000;
export const RESYNC_MS = 20_000;
/** The server sends a heartbeat every 30 s. */
export const SILENCE_MS = 45_000;
const STEADY_MS = 5000;
const RECONNECT: BackoffLimits = { baseMs: 1000, maxMs: 15_000 };

/** When to ask whether a time-driven turn has happened: shortly after it is due, then every second. */
export function turnDelay(view: SaleView, now: number, random: () => number): number | null {
  if (view.state === 'ENDED') return null;
  const due = (view.state === 'UPCOMING' ? view.startTime : view.endTime) - now;
  return due > 0 ? due + 200 + random() * 500 : spread(1000, random);
}

class StreamRefused extends Error {
  constructor(readonly retryAfterMs: number) {
    super('stream refused');
  }
}

export function startFeed({ api, clock, sku, random = Math.random }: FeedOptions): Feed {
  const state = createStore<FeedState>({ phase: 'loading', view: null, link: 'connecting' });
  const stopped = new AbortController();
  let live = false;
  let asking = false;
  let pollTimer: ReturnType<typeof setTimeout> | undefined;
  let turnTimer: ReturnType<typeof setTimeout> | undefined;
  let cutPause: (() => void) | null = null;
  let streaming = false;
  /** A first connection was tried and is over; until then the page is merely loading. */
  let tried = false;

  const patch = (change: Partial<FeedState>) => state.set({ ...state.get(), ...change });

  function show(view: SaleView): void {
    const before = state.get().view;
    if (view === before) return;
    patch({ phase: 'sale', view });
    const sameTurn = before?.state === view.state && before.startTime === view.startTime && before.endTime === view.endTime;
    if (!sameTurn) armTurn();
  }

  function armTurn(): void {
    clearTimeout(turnTimer);
    if (stopped.signal.aborted) return;
    const view = state.get().view;
    const delay = view && turnDelay(view, clock.now(), random);
    // Timers hold at most 2^31 ms; a sale further off than a day is looked at again long before.
    if (delay !== null) turnTimer = setTimeout(() => void ask().then(armTurn), Math.min(delay, 86_400_000));
  }

  async function ask(): Promise<void> {
    if (asking || stopped.signal.aborted) return;
    asking = true;
    const answer = await api.sale(sku);
    asking = false;
    if (stopped.signal.aborted) return;
    if (answer.kind === 'ok') show(withStatus(state.get().view, answer.value));
    else if (answer.kind === 'refused' && answer.status === 404) patch({ phase: 'none', view: null });
    const reached = answer.kind === 'ok' || (answer.kind === 'refused' && answer.status < 500);
    if (!live && (tried || answer.kind !== 'ok')) patch({ link: reached ? 'polling' : 'offline' });
    if (answer.kind === 'ok') void stream();
  }

  function armPoll(delay = spread(live ? RESYNC_MS : POLL_MS, random)): void {
    clearTimeout(pollTimer);
    if (stopped.signal.aborted) return;
    pollTimer = setTimeout(() => void ask().then(() => armPoll()), delay);
  }

  function setLive(next: boolean): void {
    if (stopped.signal.aborted) return;
    if (!next && state.get().link === 'connecting') patch({ link: 'polling' });
    if (live === next) return;
    live = next;
    patch({ link: next ? 'live' : 'polling' });
    armPoll(next ? undefined : random() * POLL_MS);
  }

  function take(type: string, data: string): void {
    const view = state.get().view;
    if (view === null) return;
    const event = decodeEvent(type, data);
    if (event === null) return;
    const merged = withEvent(view, event, sku !== null);
    show(merged.view);
    if (merged.ask) void ask();
  }

  let lastEventId: string | null = null;
  let retryMs = 0;

  async function readStream(): Promise<void> {
    const cut = new AbortController();
    const signal = AbortSignal.any([cut.signal, stopped.signal]);
    let silence = setTimeout(() => cut.abort(), SILENCE_MS);
    try {
      const response = await api.events(sku, lastEventId, signal);
      const isStream = response.headers.get('content-type')?.startsWith('text/event-stream');
      if (!response.ok || !isStream || response.body === null) {
        cut.abort();
        throw new StreamRefused(Number(response.headers.get('retry-after') ?? 0) * 1000 || 0);
      }
      const parser = createParser(lastEventId);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let chunk; !(chunk = await reader.read()).done; ) {
        clearTimeout(silence);
        silence = setTimeout(() => cut.abort(), SILENCE_MS);
        setLive(true);
        for (const event of parser.push(chunk.value)) take(event.type, event.data);
        lastEventId = parser.lastEventId();
        retryMs = parser.retryMs() ?? retryMs;
      }
    } finally {
      clearTimeout(silence);
      cut.abort();
    }
  }

  async function stream(): Promise<void> {
    if (streaming) return;
    streaming = true;
    for (let attempt = 0; !stopped.signal.aborted; attempt += 1) {
      const since = clock.local();
      let floorMs = retryMs;
      try {
        await readStream();
      } catch (error) {
        if (error instanceof StreamRefused) floorMs = Math.max(floorMs, error.retryAfterMs);
      }
      if (clock.local() - since > STEADY_MS) attempt = 0;
      tried = true;
      setLive(false);
      await pause(backoff(attempt, RECONNECT, random, Math.min(floorMs, 60_000)));
    }
  }

  function pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      cutPause = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  void ask().then(() => armPoll());

  return {
    state,
    wake() {
      void ask();
      cutPause?.();
    },
    stop() {
      stopped.abort();
      clearTimeout(pollTimer);
      clearTimeout(turnTimer);
      cutPause?.();
    },
  };
}
