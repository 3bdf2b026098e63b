import { describe, expect, it } from 'vitest';
import { productProblems, userIdProblem } from './validation';

describe('user id', () => {
  it.each(['', '   ', '\t\n'])('must not be empty: %j', (input) => expect(userIdProblem(input)).toMatch(/Enter/));
  it('is trimmed before it is measured', () => {
    expect(userIdProblem(` ${'a'.repeat(255)} `)).toBeNull();
    expect(userIdProblem('a'.repeat(256))).toMatch(/at most 255/);
  });
  it.each(['zoë@example.com', 'a\u0000b', 'smile 🙂', 'a\nb'])('must fit into a header: %j', (input) => {
    expect(userIdProblem(input)).toMatch(/plain/);
  });
  it.each(['user@example.com', 'x', 'First Last'])('is fine: %j', (input) => expect(userIdProblem(input)).toBeNull());
});

describe('product', () => {
  const now = Date.parse('2026-02-15T09:00:00');
  const good = { sku: 'WIDGET-001', productName: 'Widget', initialStock: '100', startTime: '2026-02-15T10:00:00', endTime: '2026-02-15T10:30:00' };
  it('is fine as in the contract', () => expect(productProblems(good, now)).toEqual({}));
  it.each([
    ['sku', ''],
    ['sku', 'has space'],
    ['sku', 'x'.repeat(65)],
    ['productName', ' '],
    ['productName', 'x'.repeat(256)],
    ['initialStock', '0'],
    ['initialStock', '1.5'],
    ['initialStock', '-3'],
    ['initialStock', '99999999999'],
    ['startTime', ''],
    ['startTime', '2026-02-15T08:59:59'],
    ['endTime', '2026-02-15T10:00:00'],
    ['endTime', 'soon'],
  ])('names what is wrong with %s = %j', (field, value) => {
    expect(Object.keys(productProblems({ ...good, [field]: value }, now))).toEqual([field]);
  });
});
