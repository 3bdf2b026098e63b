// How long to wait before trying again. Always random, so that ten thousand pages that lost the same server do not come
// back in the same instant.

export interface BackoffLimits {
  baseMs: number;
  maxMs: number;
}

/** Full jitter: anywhere between nothing and a doubling ceiling. `floorMs` is what the server asked for, and is kept. */
export function backoff(attempt: number, limits: BackoffLimits, random: () => number, floorMs = 0): number {
  const ceiling = Math.min(limits.maxMs, limits.baseMs * 2 ** Math.min(attempt, 30));
  return Math.round(floorMs + random() * ceiling);
}

/** `ms`, give or take a fifth. */
export function spread(ms: number, random: () => number): number {
  return Math.round(ms * (0.8 + random() * 0.4));
}

export const START_JITTER_MS = 500;
const START_RUSH_MS = 2000;

/**
 * The wait before a first attempt that falls into the rush at the opening: 0 to 500 ms, so that nobody wins by having
 * the shortest wire. Later, and on a second attempt, there is nothing to even out.
 */
export function startJitter(sinceStartMs: number, attempts: number, random: () => number): number {
  if (attempts > 0 || sinceStartMs > START_RUSH_MS) return 0;
  return random() * START_JITTER_MS;
}
