import { expect, it } from 'vitest';
import { credentialOf, withQuery } from './api';
import { count, isoMs, isoSpan, latency, localTimes, percent, relative, short, span, time } from './format';
import { placeOf, to } from './hooks';

it('numbers are as short as their place allows', () => {
  expect(count(1_234_567)).toBe('1,234,567');
  expect([0, 0.25, 9.94, 12.4, 999, 1000, 1250, 123_456, 5_600_000].map(short)).toEqual(['0', '0.3', '9.9', '12', '999', '1k', '1.3k', '123k', '5.6M']);
  expect([0, 50, 1600, 52_000, 3_276_800].map(latency)).toEqual(['–', '50 µs', '1.6 ms', '52 ms', '3.3 s']);
});

it('spans have at most two units', () => {
  expect([0, 999, 59_000, 61_000, 600_000, 3_600_000, 5_400_000, 90_000_000].map(span)).toEqual(['0 s', '1 s', '59 s', '1 min 1 s', '10 min', '1 h', '1 h 30 min', '1 d 1 h']);
  expect(['PT4S', 'PT1M', 'P1D', 'PT0.5S', 'nonsense'].map(isoSpan)).toEqual(['4 s', '1 min', '1 d', '1 s', 'nonsense']);
  expect(isoMs('PT1H30M')).toBe(5_400_000);
  const now = Date.parse('2026-06-01T12:00:00Z');
  expect(relative('2026-06-01T12:00:05Z', now)).toBe('in 5 s');
  expect(relative('2026-06-01T11:58:00Z', now)).toBe('2 min ago');
});

it('times are local, with the date on other days', () => {
  const at = new Date(2026, 5, 1, 9, 5, 7);
  const now = new Date(2026, 5, 1, 20, 0, 0).getTime();
  expect(time(at.getTime(), now)).toBe('09:05:07');
  expect(time(at.getTime(), now + 86_400_000)).toBe('2026-06-01 09:05:07');
  expect([time(null), time('nonsense')]).toEqual(['–', '–']);
  expect(localTimes(`Denied until ${at.toISOString()}: all.`, now)).toBe('Denied until 09:05:07: all.');
});

it('shares stay between nothing and everything', () => {
  expect([percent(1, 4), percent(9, 4), percent(-1, 4), percent(1, 0)]).toEqual([25, 100, 0, 0]);
});

it('a token is known by its three parts', () => {
  expect(credentialOf(' Bearer a-b.c_d.e ')).toEqual({ header: 'Authorization', value: 'Bearer a-b.c_d.e' });
  expect(credentialOf('a.b.c')).toEqual({ header: 'Authorization', value: 'Bearer a.b.c' });
  expect(credentialOf(' the key ')).toEqual({ header: 'X-Admin-Key', value: 'the key' });
});

it('addresses survive any name', () => {
  for (const name of ['alice', 'a/b?c#d', '100 %', 'ü']) expect(placeOf(to('key', name))).toMatchObject({ screen: 'key', name });
  expect(placeOf('')).toMatchObject({ screen: 'now', name: null });
  expect(placeOf('#/key/%zz').name).toBe('%zz');
  expect(placeOf(to('requests', null, { view: 'all', tenant: '', type: 'a&b' })).query.get('type')).toBe('a&b');
  expect(withQuery('/a', { b: 'c d', e: null, f: '', g: 1 })).toBe('/a?b=c+d&g=1');
});
