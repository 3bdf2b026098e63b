import { describe, expect, it } from 'vitest';
import { boundsOf, createServerClock, middle, narrow } from './clock';
import type { Offset } from './clock';

/** A `Date` header as a server whose clock is `offset` ahead would send it at local time `at`. */
const sampleAt = (at: number, offset: number, travel = 40, age = 0) => ({
  sentAt: at,
  receivedAt: at + travel,
  date: Math.floor((at + travel / 2 + offset) / 1000) * 1000 - age,
  age,
});

describe('server clock', () => {
  it('bounds the offset from both sides', () => {
    for (const at of [0, 250, 500, 999, 1500]) {
      const bounds = boundsOf(sampleAt(at, 123_456));
      expect(bounds.low).toBeLessThanOrEqual(123_456);
      expect(bounds.high).toBeGreaterThanOrEqual(123_456);
    }
  });

  it('narrows to a fraction of a second with a few samples', () => {
    let known: Offset | null = null;
    for (let at = 0; at < 20_000; at += 2137) known = narrow(known, sampleAt(at, -7_200_000));
    expect(Math.abs(middle(known!) + 7_200_000)).toBeLessThan(300);
  });

  it('believes the newer sample when two contradict each other', () => {
    const before = narrow(null, sampleAt(0, 0));
    expect(Math.abs(middle(narrow(before, sampleAt(5000, 60_000))) - 60_000)).toBeLessThan(1100);
  });

  it('adds the age of an answer that a cache kept', () => {
    const bounds = boundsOf(sampleAt(10_000, 5_000, 40, 1000));
    expect(bounds.low).toBeLessThanOrEqual(5_000);
    expect(bounds.high).toBeGreaterThanOrEqual(5_000);
  });

  it('uses the device clock until told better, and ignores a missing header', () => {
    let local = 100;
    const clock = createServerClock(() => local, () => 1_000_000);
    expect(clock.now()).toBe(1_000_000);
    clock.observe(new Response(null), 100);
    expect(clock.now()).toBe(1_000_000);
    clock.observe(new Response(null, { headers: { Date: 'Sun, 15 Feb 2026 10:00:00 GMT' } }), 100);
    local = 5100;
    expect(Math.abs(clock.now() - Date.parse('2026-02-15T10:00:05.000Z'))).toBeLessThanOrEqual(500);
  });
});
