// Input checked before it is sent: the contract's rules, in words for the person typing.

export const USER_ID_MAX = 255;

/** What is wrong with it, or `null`. The id travels in a header, which holds plain characters only. */
export function userIdProblem(input: string): string | null {
  const id = input.trim();
  if (id === '') return 'Enter your e-mail address or user name.';
  if (id.length > USER_ID_MAX) return `Use at most ${USER_ID_MAX} characters; this has ${id.length}.`;
  if (!/^[\x20-\x7e]+$/.test(id)) return 'Use plain letters, digits and signs only, without accents or emoji.';
  return null;
}

export interface ProductInput {
  sku: string;
  productName: string;
  initialStock: string;
  /** As a datetime-local field holds it: local time without a zone. */
  startTime: string;
  endTime: string;
}

export type ProductProblems = Partial<Record<keyof ProductInput, string>>;

const SKU = /^[A-Za-z0-9-]{1,64}$/;
const STOCK_MAX = 2_147_483_647;

export function skuProblem(sku: string): string | null {
  if (sku.trim() === '') return 'Enter a SKU.';
  return SKU.test(sku.trim()) ? null : 'Use up to 64 letters, digits and hyphens.';
}

function nameProblem(name: string): string | null {
  if (name.trim() === '') return 'Enter a name.';
  return name.trim().length > 255 ? 'Use at most 255 characters.' : null;
}

function stockProblem(stock: string): string | null {
  const units = Number(stock);
  const whole = /^\d+$/.test(stock.trim()) && units >= 1 && units <= STOCK_MAX;
  return whole ? null : 'Enter a whole number, 1 or more.';
}

/** `now` is the server's clock, which is the one that decides. */
export function productProblems(input: ProductInput, now: number): ProductProblems {
  const start = Date.parse(input.startTime);
  const end = Date.parse(input.endTime);
  const found: Record<keyof ProductInput, string | null> = {
    sku: skuProblem(input.sku),
    productName: nameProblem(input.productName),
    initialStock: stockProblem(input.initialStock),
    startTime: Number.isNaN(start) ? 'Enter a date and time.' : start <= now ? 'Must be in the future.' : null,
    endTime: Number.isNaN(end) ? 'Enter a date and time.' : end <= start ? 'Must be after the start.' : null,
  };
  return Object.fromEntries(Object.entries(found).filter(([, problem]) => problem !== null)) as ProductProblems;
}
