// What the server says of itself each second: one event stream, the history that it begins with, and what is known of the
// connection. Knows nothing of React.
import { backoff } from '../backoff';
import { createParser } from '../sse';
import type { Api } from './api';
import { ApiFailure } from './api';

export interface Hello {
  version: string;
  readOnly: boolean;
  startedAt: string;
  roles: string[];
  engines: string[];
  sharedStore: boolean;
  knowsServers: boolean;
  address: string;
}

export interface Engine {
  name: string;
  up: boolean;
  latencyMs: number;
  reason: string | null;
  since: string;
}

export interface Downstream {
  name: string;
  waiting: number;
  running: number;
  parked: number;
  oldestWaitingSeconds: number | null;
  breaker: 'closed' | 'halfOpen' | 'open' | null;
}

export interface Snapshot {
  at: string;
  second: number;
  series: Record<string, number>;
  engines: Engine[];
  capabilities: { name: string; ready: boolean; reason: string | null }[];
  backlog: {
    downstreams: Downstream[];
    oldestPendingSeconds: number;
    deadRequests: number;
    deadLetters: Record<string, number>;
  } | null;
  nearLimits: { capability: string; limitName: string; key: string; limit: number; remaining: number; denials: number; until: string | null }[];
  connections: number;
  streams: number;
}

/** Columns: the steps, and a number for each step in every series. */
export interface Ring {
  steps: number[];
  series: Record<string, number[]>;
}

/** `stale`: connected, but nothing came for some seconds. `lost`: not connected; what is shown is old. */
export type Link = 'connecting' | 'live' | 'stale' | 'lost';

export interface LiveState {
  link: Link;
  hello: Hello | null;
  seconds: Ring;
  minutes: Ring;
  snapshot: Snapshot | null;
  /** When the last snapshot came, on the device's clock. */
  heardAt: number;
  /** When the next attempt is made, while the link is lost. */
  retryAt: number | null;
}

export const SECONDS_MAX = 15 * 60;
export const MINUTES_MAX = 24 * 60;
export const STALE_MS = 5000;
/** Without a snapshot for so long the connection is taken for dead. */
export const DEAD_MS = 15_000;

const EMPTY: Ring = { steps: [], series: {} };

export const initial: LiveState = {
  link: 'connecting',
  hello: null,
  seconds: EMPTY,
  minutes: EMPTY,
  snapshot: null,
  heardAt: 0,
  retryAt: null,
};

/** Levels have a height; of a minute the highest second is shown. Everything else is counted and adds up. */
export function isLevel(name: string): boolean {
  return /Us$|\.(waiting|jobsDue|streams)$/.test(name);
}

/** The ring with a step more, or with more in its last step. Steps that are too old go. */
export function extend(ring: Ring, step: number, sample: Record<string, number>, stepsMax: number): Ring {
  const last = ring.steps.at(-1);
  const merges = last !== undefined && step <= last;
  const steps = merges ? ring.steps : [...ring.steps, step];
  const newest = steps.at(-1) ?? step;
  const first = Math.max(0, steps.findIndex((one) => newest - one < stepsMax));
  const names = new Set([...Object.keys(ring.series), ...Object.keys(sample)]);
  const series: Record<string, number[]> = {};
  for (const name of names) {
    const before = ring.series[name] ?? new Array<number>(ring.steps.length).fill(0);
    const value = sample[name] ?? 0;
    const present = before.at(-1) ?? 0;
    const column = merges ? [...before.slice(0, -1), isLevel(name) ? Math.max(present, value) : present + value] : [...before, value];
    series[name] = first > 0 ? column.slice(first) : column;
  }
  return { steps: first > 0 ? steps.slice(first) : steps, series };
}

export function withSnapshot(state: LiveState, snapshot: Snapshot, heardAt: number): LiveState {
  // The history of a stream may have the second that its first snapshot is about.
  const known = state.seconds.steps.at(-1) ?? -1;
  const isNew = snapshot.second > known;
  return {
    ...state,
    link: 'live',
    snapshot,
    heardAt,
    retryAt: null,
    seconds: isNew ? extend(state.seconds, snapshot.second, snapshot.series, SECONDS_MAX) : state.seconds,
    minutes: isNew ? extend(state.minutes, Math.floor(snapshot.second / 60), snapshot.series, MINUTES_MAX) : state.minutes,
  };
}

/** The sum of the last `seconds` of a series, and for how many there are samples. */
export function recent(ring: Ring, name: string, seconds: number): { sum: number; steps: number } {
  const column = ring.series[name] ?? [];
  const newest = ring.steps.at(-1) ?? 0;
  let sum = 0;
  let steps = 0;
  for (let at = column.length - 1; at >= 0 && newest - (ring.steps[at] ?? 0) < seconds; at -= 1) {
    sum += column[at] ?? 0;
    steps += 1;
  }
  return { sum, steps };
}

export interface LiveFeed {
  state(): LiveState;
  subscribe(listener: () => void): () => void;
  stop(): void;
}

export interface LiveOptions {
  now?: () => number;
  random?: () => number;
  /** Called when the first attempt is refused, and whenever the credentials are. */
  onRefused(failure: ApiFailure): void;
}

export function createLiveFeed(api: Api, { now = () => Date.now(), random = Math.random, onRefused }: LiveOptions): LiveFeed {
  let state = initial;
  let attempt = 0;
  let stopped = false;
  let open: AbortController | null = null;
  let retry: ReturnType<typeof setTimeout> | undefined;
  const listeners = new Set<() => void>();

  function set(next: LiveState): void {
    state = next;
    listeners.forEach((listener) => listener());
  }

  function heard(type: string, data: string): void {
    const at = now();
    if (type === 'hello') set({ ...state, hello: JSON.parse(data) as Hello });
    else if (type === 'history') {
      const history = JSON.parse(data) as { seconds: Ring; minutes: Ring };
      set({ ...state, seconds: history.seconds, minutes: history.minutes, link: 'live', heardAt: at, retryAt: null });
    } else if (type === 'snapshot') {
      attempt = 0;
      set(withSnapshot(state, JSON.parse(data) as Snapshot, at));
    }
  }

  async function follow(controller: AbortController): Promise<void> {
    const response = await api.raw('/admin/live', { signal: controller.signal, headers: { Accept: 'text/event-stream' } });
    if (!response.ok) {
      const body = (await response.json().catch(() => ({}))) as { code?: string; message?: string };
      throw new ApiFailure(response.status, body.code ?? 'UNKNOWN', body.message ?? `The server answered ${response.status}.`);
    }
    const parser = createParser();
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const chunk = await reader?.read();
      if (chunk === undefined || chunk.done) return;
      for (const event of parser.push(chunk.value)) heard(event.type, event.data);
    }
  }

  async function connect(): Promise<void> {
    const controller = new AbortController();
    open = controller;
    try {
      await follow(controller);
    } catch (error) {
      if (stopped) return;
      const refused = error instanceof ApiFailure && error.status !== 0;
      if (refused && (state.hello === null || error.status === 401 || error.status === 403)) {
        stop();
        onRefused(error);
        return;
      }
    }
    if (stopped) return;
    attempt += 1;
    const wait = backoff(attempt, { baseMs: 500, maxMs: 10_000 }, random, 250);
    set({ ...state, link: state.hello === null ? 'connecting' : 'lost', retryAt: now() + wait });
    retry = setTimeout(() => void connect(), wait);
  }

  const watch = setInterval(() => {
    if (state.link !== 'live' && state.link !== 'stale') return;
    const silent = now() - state.heardAt;
    if (silent > DEAD_MS) open?.abort();
    else if (silent > STALE_MS && state.link === 'live') set({ ...state, link: 'stale' });
  }, 1000);

  function stop(): void {
    stopped = true;
    clearInterval(watch);
    clearTimeout(retry);
    open?.abort();
  }

  void connect();
  return {
    state: () => state,
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    stop,
  };
}
