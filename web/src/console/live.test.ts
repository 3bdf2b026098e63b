import { describe, expect, it, vi } from 'vitest';
import type { Api } from './api';
import { ApiFailure } from './api';
import { createLiveFeed, extend, initial, isLevel, recent, withSnapshot } from './live';
import type { Ring, Snapshot } from './live';

const EMPTY: Ring = { steps: [], series: {} };

function snapshot(second: number, series: Record<string, number>): Snapshot {
  return { at: '2026-01-01T00:00:00Z', second, series, engines: [], capabilities: [], backlog: null, nearLimits: [], connections: 0, streams: 0 };
}

describe('a ring', () => {
  it('has a column for each step and drops those that are too old', () => {
    let ring = EMPTY;
    for (const step of [1, 2, 3, 6]) ring = extend(ring, step, { 'quota.allowed': step }, 4);
    expect(ring).toEqual({ steps: [3, 6], series: { 'quota.allowed': [3, 6] } });
  });

  it('adds up what is counted and takes the highest of levels within a step', () => {
    let ring = extend(EMPTY, 1, { 'quota.allowed': 2, 'quota.p99Us': 800 }, 10);
    ring = extend(ring, 1, { 'quota.allowed': 3, 'quota.p99Us': 200 }, 10);
    expect(ring.series).toEqual({ 'quota.allowed': [5], 'quota.p99Us': [800] });
    expect(['quota.p50Us', 'quota.waiting', 'request.jobsDue', 'sale.streams'].every(isLevel)).toBe(true);
    expect(['quota.allowed', 'request.completed'].some(isLevel)).toBe(false);
  });

  it('fills a series that begins late', () => {
    const ring = extend(extend(EMPTY, 1, {}, 10), 2, { 'sale.allowed': 4 }, 10);
    expect(ring.series['sale.allowed']).toEqual([0, 4]);
  });

  it('sums its last seconds, whatever is missing', () => {
    let ring = EMPTY;
    for (const step of [1, 8, 9, 10]) ring = extend(ring, step, { a: 1 }, 100);
    expect(recent(ring, 'a', 3)).toEqual({ sum: 3, steps: 3 });
    expect(recent(ring, 'a', 2)).toEqual({ sum: 2, steps: 2 });
    expect(recent(ring, 'b', 3)).toEqual({ sum: 0, steps: 0 });
  });
});

it('a second that the history has is not counted again', () => {
  const before = { ...initial, seconds: extend(EMPTY, 7, { 'quota.allowed': 3 }, 900), minutes: extend(EMPTY, 0, { 'quota.allowed': 3 }, 1440) };
  const same = withSnapshot(before, snapshot(7, { 'quota.allowed': 3 }), 1);
  expect(same.seconds.series['quota.allowed']).toEqual([3]);
  expect(same.minutes.series['quota.allowed']).toEqual([3]);
  const next = withSnapshot(same, snapshot(8, { 'quota.allowed': 2 }), 2);
  expect(next.seconds.series['quota.allowed']).toEqual([3, 2]);
  expect(next.minutes.series['quota.allowed']).toEqual([5]);
});

/** A stream that the test feeds. */
function fake(status = 200) {
  const bodies: ReadableStreamDefaultController<Uint8Array>[] = [];
  const calls: AbortSignal[] = [];
  const api = {
    async raw(_path: string, init: RequestInit) {
      const signal = init.signal as AbortSignal;
      calls.push(signal);
      if (status === 0) throw new ApiFailure(0, 'UNREACHABLE', 'no');
      if (status !== 200) return new Response('{"code":"UNAUTHENTICATED","message":"no"}', { status });
      const body = new ReadableStream<Uint8Array>({
        start(controller) {
          bodies.push(controller);
          signal.addEventListener('abort', () => controller.error(new Error('aborted')));
        },
      });
      return new Response(body);
    },
  } as unknown as Api;
  const say = (type: string, data: unknown) => bodies.at(-1)?.enqueue(new TextEncoder().encode(`event: ${type}\ndata: ${JSON.stringify(data)}\n\n`));
  return { api, calls, bodies, say };
}

describe('the feed', () => {
  it('is live, then stale, then gives the connection up and tries again', async () => {
    vi.useFakeTimers();
    const { api, calls, say } = fake();
    const feed = createLiveFeed(api, { random: () => 0, onRefused: () => expect.unreachable() });
    await vi.advanceTimersByTimeAsync(10);
    say('hello', { version: '1' });
    say('history', { seconds: EMPTY, minutes: EMPTY });
    say('snapshot', snapshot(1, {}));
    await vi.advanceTimersByTimeAsync(10);
    expect(feed.state().link).toBe('live');
    await vi.advanceTimersByTimeAsync(7000);
    expect(feed.state().link).toBe('stale');
    say('snapshot', snapshot(9, {}));
    await vi.advanceTimersByTimeAsync(10);
    expect(feed.state().link).toBe('live');
    await vi.advanceTimersByTimeAsync(17_000);
    expect(calls.length).toBe(2);
    say('hello', { version: '1' });
    say('history', { seconds: EMPTY, minutes: EMPTY });
    await vi.advanceTimersByTimeAsync(10);
    expect(feed.state().link).toBe('live');
    feed.stop();
    vi.useRealTimers();
  });

  it('says that it is refused, and does not try again', async () => {
    vi.useFakeTimers();
    const { api, calls } = fake(401);
    const refused = vi.fn();
    const feed = createLiveFeed(api, { onRefused: refused });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(refused).toHaveBeenCalledOnce();
    expect(calls.length).toBe(1);
    feed.stop();
    vi.useRealTimers();
  });

  it('waits ever longer for a server that does not answer', async () => {
    vi.useFakeTimers();
    const { api, calls } = fake(0);
    const feed = createLiveFeed(api, { random: () => 1, onRefused: () => expect.unreachable() });
    await vi.advanceTimersByTimeAsync(0);
    expect(feed.state()).toMatchObject({ link: 'connecting' });
    expect(feed.state().retryAt).not.toBeNull();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(calls.length).toBeGreaterThan(4);
    expect(calls.length).toBeLessThan(12);
    feed.stop();
    vi.useRealTimers();
  });
});
