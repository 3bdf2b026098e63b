import { describe, expect, it } from 'vitest';
import { backoff, spread, startJitter } from './backoff';

const limits = { baseMs: 1000, maxMs: 15_000 };

describe('backoff', () => {
  it('doubles its ceiling up to the limit and uses the whole range below', () => {
    expect([0, 1, 2, 3, 4, 99].map((n) => backoff(n, limits, () => 1))).toEqual([1000, 2000, 4000, 8000, 15_000, 15_000]);
    expect(backoff(4, limits, () => 0)).toBe(0);
  });

  it('keeps what the server asked for', () => {
    expect(backoff(0, limits, () => 0, 3000)).toBe(3000);
  });

  it('spreads a period by a fifth', () => {
    expect(spread(2000, () => 0)).toBe(1600);
    expect(spread(2000, () => 1)).toBe(2400);
  });
});

describe('jitter at the start', () => {
  it('is between 0 and 500 ms for a first attempt in the opening rush', () => {
    expect(startJitter(10, 0, () => 0)).toBe(0);
    expect(startJitter(10, 0, () => 0.999)).toBeLessThan(500);
    expect(startJitter(10, 0, () => 0.5)).toBe(250);
  });

  it('is nothing later, or on a second attempt', () => {
    expect(startJitter(2001, 0, () => 0.9)).toBe(0);
    expect(startJitter(10, 1, () => 0.9)).toBe(0);
  });
});
