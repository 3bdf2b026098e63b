// The few bridges between React and the rest of the page.
import { useEffect, useState, useSyncExternalStore } from 'react';
import type { ServerClock } from './clock';
import { secondsLeft, untilNextSecond } from './countdown';
import type { Store } from './store';

export function useStore<T>(store: Store<T>): T {
  return useSyncExternalStore(store.subscribe, store.get);
}

/** Whole seconds until `target` on the given clock; draws again exactly when they change. */
export function useSecondsLeft(target: number, now: () => number): number {
  const [, tick] = useState(0);
  const left = secondsLeft(target, now());
  useEffect(() => {
    if (left === 0) return;
    const timer = setTimeout(() => tick((n) => n + 1), Math.min(untilNextSecond(target, now()), 1000));
    return () => clearTimeout(timer);
  });
  return left;
}

export function useTitle(title: string): void {
  useEffect(() => {
    document.title = title;
  }, [title]);
}

/** The server's time as a local date and time, with the zone named. */
export function localTime(ms: number, clock: ServerClock): string {
  const today = new Date(clock.now()).toDateString() === new Date(ms).toDateString();
  const date: Intl.DateTimeFormatOptions = today ? {} : { weekday: 'short', day: 'numeric', month: 'short' };
  const seconds: Intl.DateTimeFormatOptions = ms % 60_000 < 1000 ? {} : { second: '2-digit' };
  const time: Intl.DateTimeFormatOptions = { hour: '2-digit', minute: '2-digit', ...seconds, timeZoneName: 'short' };
  return new Intl.DateTimeFormat('en-GB', { ...date, ...time }).format(ms);
}
