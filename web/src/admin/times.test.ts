import { expect, it } from 'vitest';
import { fromField, inUtc, suggestedTimes, toField } from './times';

it('keeps an instant through the field and back', () => {
  const ms = Date.parse('2026-02-15T10:00:30.000Z');
  expect(fromField(toField(ms))).toBe('2026-02-15T10:00:30.000Z');
  expect(inUtc(toField(ms))).toBe('2026-02-15 10:00:30 UTC');
});

it('suggests a sale in the future, whatever the second', () => {
  const now = Date.parse('2026-02-15T10:00:59.999Z');
  const { startTime, endTime } = suggestedTimes(now);
  expect(Date.parse(startTime)).toBeGreaterThan(now);
  expect(Date.parse(endTime) - Date.parse(startTime)).toBe(1_800_000);
});

it('shows nothing for what is not a time', () => expect(inUtc('')).toBe(''));
