// What the page knows of the sale, and how news changes it. Status answers may be a second old (they are cached on the
// way) and a replay repeats what is known, so news is merged: within one sale the state only moves forward and, once it
// is active, the stock only falls.
import type { Sale, SaleEvent, SaleState } from './contract';

export type EndReason = 'SOLD_OUT' | 'TIME_EXPIRED';

export interface SaleView extends Sale {
  endReason: EndReason | null;
}

const RANK: Record<SaleState, number> = { UPCOMING: 0, ACTIVE: 1, ENDED: 2 };

/** Names one run of a sale: after a reset the same sku starts again at another time, and counts from the top. */
export function runOf(sale: Pick<Sale, 'sku' | 'startTime'>): string {
  return `${sale.sku}@${sale.startTime}`;
}

function reasonFor(state: SaleState, stock: number): EndReason | null {
  if (state !== 'ENDED') return null;
  return stock === 0 ? 'SOLD_OUT' : 'TIME_EXPIRED';
}

function advance(view: SaleView, state: SaleState, stock: number): SaleView {
  const next = RANK[state] > RANK[view.state] ? state : view.state;
  const left = next === 'UPCOMING' ? stock : Math.min(view.stock, stock);
  const endReason = reasonFor(next, left);
  if (next === view.state && left === view.stock && endReason === view.endReason) return view;
  return { ...view, state: next, stock: left, endReason };
}

/** A status answer. `null` known means none has come yet. */
export function withStatus(known: SaleView | null, sale: Sale): SaleView {
  const fresh = { ...sale, endReason: reasonFor(sale.state, sale.stock) };
  if (known === null || runOf(known) !== runOf(sale) || known.state === 'UPCOMING') return fresh;
  return advance({ ...known, productName: sale.productName, initialStock: sale.initialStock, endTime: sale.endTime }, sale.state, sale.stock);
}

export interface Merge {
  view: SaleView;
  /** The event tells of a sale that this page must ask about: another sku, or another run of this one. */
  ask: boolean;
}

export function withEvent(view: SaleView, event: SaleEvent, pinned: boolean): Merge {
  if (event.sku !== view.sku) {
    // Another sale concerns us only where the page follows "the current sale" and ours is not running.
    return { view, ask: !pinned && view.state !== 'ACTIVE' && event.type !== 'stock-update' };
  }
  switch (event.type) {
    case 'initial':
      if (runOf(event) !== runOf(view)) return { view, ask: true };
      return { view: advance({ ...view, endTime: event.endTime }, event.state, event.stock), ask: false };
    case 'stock-update':
      return { view: advance(view, view.state, event.stock), ask: false };
    case 'state-change':
      return { view: advance(view, event.state, event.reason === 'SOLD_OUT' ? 0 : view.stock), ask: false };
  }
}
