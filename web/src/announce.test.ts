import { describe, expect, it } from 'vitest';
import { announcement, stockMark } from './announce';
import type { SaleView } from './sale';

const view: SaleView = {
  sku: 'W-1', productName: 'Widget', state: 'ACTIVE', stock: 60, initialStock: 100, startTime: 0, endTime: 600_000, endReason: null,
};
const say = (before: Partial<SaleView>, after: Partial<SaleView>, from = 1000, to = 2000) =>
  announcement({ view: { ...view, ...before }, now: from }, { view: { ...view, ...after }, now: to });

describe('announcements', () => {
  it('tell each turn once', () => {
    expect(say({ state: 'UPCOMING', startTime: 1500 }, { startTime: 1500 })).toBe('The sale is open. 60 units available.');
    expect(say({ stock: 1 }, { stock: 0, state: 'ENDED', endReason: 'SOLD_OUT' })).toBe('Sold out. The sale has ended.');
    expect(say({}, { state: 'ENDED', endReason: 'TIME_EXPIRED' })).toBe('The sale has ended.');
    expect(say({ state: 'ENDED' }, { state: 'ENDED' })).toBeNull();
  });

  it('tell round figures of the stock, and the last five', () => {
    expect(say({ stock: 51 }, { stock: 50 })).toBe('50 units left.');
    expect(say({ stock: 50 }, { stock: 49 })).toBeNull();
    expect(say({ stock: 2 }, { stock: 1 })).toBe('1 unit left.');
    expect(stockMark(8, 7, 8)).toBe(false);
  });

  it('tell the last minute', () => {
    expect(say({}, {}, 539_000, 540_000)).toBe('The sale closes in 1 minute.');
    expect(say({ state: 'UPCOMING', startTime: 600_000 }, { state: 'UPCOMING', startTime: 600_000 }, 589_000, 590_000)).toBe('The sale opens in 10 seconds.');
  });

  it('are silent on a first look', () => expect(announcement(null, { view, now: 0 })).toBeNull());
});
