// What screens share: the session, the address bar, data that is loaded and goes stale, and the time.
import { createContext, useCallback, useContext, useEffect, useRef, useState, useSyncExternalStore } from 'react';
import type { Api } from './api';
import { ApiFailure } from './api';
import type { Store } from '../store';
import type { Progress } from './demo';
import type { LiveFeed, LiveState } from './live';

export interface Session {
  api: Api;
  live: LiveFeed;
  /** Whether the credentials may change nothing. */
  readOnly: boolean;
  /** The demo load goes on while other screens are looked at. */
  demo: Store<DemoState>;
  /** Says something to screen readers, and shows it for a while. */
  say(words: string): void;
}

export interface DemoState {
  progress: Progress | null;
  running: AbortController | null;
}

export const SessionContext = createContext<Session | null>(null);

export function useSession(): Session {
  const session = useContext(SessionContext);
  if (session === null) throw new Error('no session');
  return session;
}

export function useLive(): LiveState {
  const { live } = useSession();
  return useSyncExternalStore(live.subscribe, live.state);
}

/** The device's time, drawn again every `stepMs`. */
export function useNow(stepMs = 1000): number {
  const [now, setNow] = useState(() => Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), stepMs);
    return () => clearInterval(timer);
  }, [stepMs]);
  return now;
}

export interface Resource<T> {
  data: T | null;
  failure: ApiFailure | null;
  /** While the first answer, or that to another question, is awaited. */
  loading: boolean;
  /** When `data` was read. */
  at: number;
  reload(): void;
}

/**
 * What `load` gives, read again when `key` changes and every `everyMs`. After a failure the data stays, and `failure` says why
 * it is old. An answer to an earlier question is dropped.
 */
export function useResource<T>(key: string | null, load: () => Promise<T>, everyMs = 0): Resource<T> {
  const [state, setState] = useState<{ key: string | null; data: T | null; failure: ApiFailure | null; at: number }>({
    key: null,
    data: null,
    failure: null,
    at: 0,
  });
  const [round, setRound] = useState(0);
  const loader = useRef(load);
  loader.current = load;

  useEffect(() => {
    if (key === null) return;
    let current = true;
    let timer: ReturnType<typeof setTimeout> | undefined;
    async function read(): Promise<void> {
      try {
        const data = await loader.current();
        if (current) setState({ key, data, failure: null, at: Date.now() });
      } catch (error) {
        const failure = error instanceof ApiFailure ? error : new ApiFailure(0, 'UNREADABLE', 'The answer could not be read.');
        if (current) setState((before) => ({ key, data: before.key === key ? before.data : null, failure, at: before.at }));
      }
      if (current && everyMs > 0) timer = setTimeout(() => void next(), everyMs);
    }
    // A tab that nobody sees asks for nothing.
    function next(): void {
      if (document.visibilityState === 'visible') void read();
      else timer = setTimeout(next, everyMs);
    }
    void read();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [key, round, everyMs]);

  const reload = useCallback(() => setRound((n) => n + 1), []);
  const isOf = state.key === key;
  return {
    data: isOf ? state.data : null,
    failure: isOf ? state.failure : null,
    loading: key !== null && (!isOf || (state.data === null && state.failure === null)),
    at: state.at,
    reload,
  };
}

export interface Place {
  screen: string;
  /** The rest of the path, decoded. */
  name: string | null;
  query: URLSearchParams;
}

export function placeOf(hash: string): Place {
  const [path = '', query = ''] = hash.replace(/^#\/?/, '').split('?');
  const [screen = '', ...rest] = path.split('/');
  let name: string | null = null;
  if (rest.length > 0) {
    try {
      name = decodeURIComponent(rest.join('/'));
    } catch {
      name = rest.join('/');
    }
  }
  return { screen: screen === '' ? 'now' : screen, name: name === '' ? null : name, query: new URLSearchParams(query) };
}

/** The address of a screen. The fragment never reaches a server. */
export function to(screen: string, name?: string | null, query: Record<string, string | null | undefined> = {}): string {
  const given = Object.entries(query).filter((entry): entry is [string, string] => Boolean(entry[1]));
  const text = new URLSearchParams(given).toString();
  return `#/${screen}${name ? `/${encodeURIComponent(name)}` : ''}${text ? `?${text}` : ''}`;
}

export function go(address: string): void {
  window.location.hash = address;
}

const onHash = (listener: () => void) => {
  window.addEventListener('hashchange', listener);
  return () => window.removeEventListener('hashchange', listener);
};

export function usePlace(): Place {
  const hash = useSyncExternalStore(onHash, () => window.location.hash);
  return placeOf(hash);
}
