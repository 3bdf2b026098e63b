// What is worth saying aloud to someone who cannot watch the numbers move: turns, round figures and the last few units;
// never every tick.
import { markPassed, secondsLeft, spoken } from './countdown';
import type { SaleView } from './sale';

export interface Heard {
  view: SaleView;
  now: number;
}

function turn(before: SaleView, after: SaleView): string | null {
  if (before.state === after.state) return null;
  if (after.state === 'ACTIVE') return `The sale is open. ${units(after.stock)} available.`;
  if (after.state === 'ENDED') return after.endReason === 'SOLD_OUT' ? 'Sold out. The sale has ended.' : 'The sale has ended.';
  return 'The sale has not started yet.';
}

function units(stock: number): string {
  return stock === 1 ? '1 unit' : `${stock} units`;
}

/** Half, a quarter, a tenth, and the last five one by one. */
export function stockMark(before: number, after: number, initial: number): boolean {
  const marks = [0.5, 0.25, 0.1].map((share) => Math.floor(initial * share)).filter((mark) => mark > 5);
  return [...marks, 5, 4, 3, 2, 1].some((mark) => before > mark && after <= mark);
}

export function announcement(before: Heard | null, after: Heard): string | null {
  if (before === null || before.view.sku !== after.view.sku) return null;
  const turned = turn(before.view, after.view);
  if (turned !== null) return turned;
  const { state, stock, initialStock, startTime, endTime } = after.view;
  if (state === 'ENDED') return null;
  if (stockMark(before.view.stock, stock, initialStock)) return `${units(stock)} left.`;
  const target = state === 'UPCOMING' ? startTime : endTime;
  const mark = markPassed(secondsLeft(target, before.now), secondsLeft(target, after.now));
  if (mark === null) return null;
  return state === 'UPCOMING' ? `The sale opens in ${spoken(mark)}.` : `The sale closes in ${spoken(mark)}.`;
}
