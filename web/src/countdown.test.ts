import { describe, expect, it } from 'vitest';
import { markPassed, partsOf, secondsLeft, short, spoken, untilNextSecond } from './countdown';

describe('countdown', () => {
  it('shows zero only when the time has come', () => {
    expect(secondsLeft(10_000, 9_999)).toBe(1);
    expect(secondsLeft(10_000, 10_000)).toBe(0);
    expect(secondsLeft(10_000, 20_000)).toBe(0);
  });

  it('splits into days, hours, minutes and seconds', () => {
    expect(partsOf(2 * 86_400 + 3 * 3600 + 4 * 60 + 5)).toEqual({ days: 2, hours: 3, minutes: 4, seconds: 5 });
  });

  it('wakes exactly when the shown second changes', () => {
    for (const now of [0, 1, 250, 999, 8_500, 9_999]) {
      const wait = untilNextSecond(10_000, now);
      expect(secondsLeft(10_000, now + wait)).toBe(secondsLeft(10_000, now) - 1);
      expect(secondsLeft(10_000, now + wait - 1)).toBe(secondsLeft(10_000, now));
    }
    expect(untilNextSecond(0, 10)).toBeGreaterThan(0);
  });

  it.each([
    [0, '00:00', '0 seconds'],
    [61, '01:01', '1 minute 1 second'],
    [3723, '1:02:03', '1 hour 2 minutes'],
    [90_061, '1 d 01:01:01', '1 day 1 hour'],
    [600, '10:00', '10 minutes'],
  ])('writes and says %i seconds', (seconds, written, said) => {
    expect(short(seconds)).toBe(written);
    expect(spoken(seconds)).toBe(said);
  });

  it('notices the nearest mark that was passed, once', () => {
    expect(markPassed(61, 60)).toBe(60);
    expect(markPassed(60, 59)).toBeNull();
    expect(markPassed(400, 9)).toBe(10);
  });
});
