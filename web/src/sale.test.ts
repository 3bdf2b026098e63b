import { describe, expect, it } from 'vitest';
import type { Sale } from './contract';
import { withEvent, withStatus } from './sale';

const sale: Sale = {
  sku: 'W-1',
  productName: 'Widget',
  state: 'ACTIVE',
  stock: 10,
  initialStock: 100,
  startTime: 1_000,
  endTime: 60_000,
};
const view = withStatus(null, sale);
const initial = { type: 'initial', sku: 'W-1', state: 'ACTIVE', stock: 10, startTime: 1_000, endTime: 60_000 } as const;

describe('status answers', () => {
  it('are taken whole when nothing is known', () => {
    expect(view).toEqual({ ...sale, endReason: null });
  });

  it('that are older than what is known change nothing', () => {
    expect(withStatus({ ...view, stock: 4 }, sale).stock).toBe(4);
    expect(withStatus({ ...view, state: 'ENDED', stock: 0, endReason: 'SOLD_OUT' }, sale)).toMatchObject({ state: 'ENDED', stock: 0 });
  });

  it('of another run or another sale replace everything, even an end', () => {
    const ended = { ...view, state: 'ENDED', stock: 0, endReason: 'SOLD_OUT' } as const;
    const again = { ...sale, state: 'UPCOMING', stock: 100, startTime: 90_000, endTime: 99_000 } as const;
    expect(withStatus(ended, again)).toEqual({ ...again, endReason: null });
    expect(withStatus(ended, { ...sale, sku: 'W-2' }).sku).toBe('W-2');
  });

  it('may raise the stock before the start, when the product is edited', () => {
    const upcoming = withStatus(null, { ...sale, state: 'UPCOMING', stock: 100 });
    expect(withStatus(upcoming, { ...sale, state: 'UPCOMING', stock: 200, initialStock: 200 }).stock).toBe(200);
  });

  it('tell a sold-out end from one by the clock', () => {
    expect(withStatus(null, { ...sale, state: 'ENDED', stock: 0 }).endReason).toBe('SOLD_OUT');
    expect(withStatus(null, { ...sale, state: 'ENDED', stock: 3 }).endReason).toBe('TIME_EXPIRED');
  });
});

describe('events', () => {
  it('lower the stock and never raise it, in whatever order a replay brings them', () => {
    const stocks = [9, 8, 10, 7, 9].reduce((v, stock) => withEvent(v, { type: 'stock-update', sku: 'W-1', stock }, true).view, view);
    expect(stocks.stock).toBe(7);
  });

  it('move the state forward only', () => {
    const ended = withEvent(view, { type: 'state-change', sku: 'W-1', state: 'ENDED', reason: 'SOLD_OUT' }, true).view;
    expect(ended).toMatchObject({ state: 'ENDED', stock: 0, endReason: 'SOLD_OUT' });
    expect(withEvent(ended, { type: 'state-change', sku: 'W-1', state: 'ACTIVE' }, true).view.state).toBe('ENDED');
  });

  it('that change nothing return the same view, so nothing is drawn again', () => {
    expect(withEvent(view, { type: 'stock-update', sku: 'W-1', stock: 10 }, true).view).toBe(view);
  });

  it('of another run make the page ask', () => {
    expect(withEvent(view, { ...initial, startTime: 5_000 }, true)).toEqual({ view, ask: true });
    expect(withEvent(view, initial, true).ask).toBe(false);
  });

  it('of another sale matter only to a page that follows the current sale and has none running', () => {
    const other = { ...initial, sku: 'W-2' };
    const ended = { ...view, state: 'ENDED', endReason: 'TIME_EXPIRED' } as const;
    expect(withEvent(ended, other, false).ask).toBe(true);
    expect(withEvent(ended, other, true).ask).toBe(false);
    expect(withEvent(view, other, false).ask).toBe(false);
  });
});
