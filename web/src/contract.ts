// The wire: what the sale API sends and takes, and decoders that trust nothing. The rest of the page only sees these
// types. Names and codes are the contract's own.

export type SaleState = 'UPCOMING' | 'ACTIVE' | 'ENDED';

export interface Sale {
  sku: string;
  productName: string;
  state: SaleState;
  stock: number;
  initialStock: number;
  /** Epoch milliseconds. */
  startTime: number;
  endTime: number;
}

export interface Purchase {
  purchaseNo: string;
  purchasedAt: string;
}

export interface Product {
  sku: string;
  productName: string;
  initialStock: number;
  startTime: number;
  endTime: number;
  state: SaleState;
  createdAt: string;
  /** Absent in the answers to POST and PUT. */
  currentStock?: number;
  totalPurchases?: number;
}

export interface ApiError {
  code: string;
  message: string;
  fields?: Record<string, string>;
  /** Seconds, on 429. */
  retryAfter?: number;
}

export type SaleEvent =
  | { type: 'initial'; sku: string; state: SaleState; stock: number; startTime: number; endTime: number }
  | { type: 'stock-update'; sku: string; stock: number }
  | { type: 'state-change'; sku: string; state: SaleState; reason?: string };

type Json = Record<string, unknown>;

/** A response that is not what the contract says. */
export class ContractError extends Error {}

export function asObject(value: unknown): Json {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new ContractError('not an object');
  return value as Json;
}

function text(json: Json, field: string): string {
  const value = json[field];
  if (typeof value !== 'string') throw new ContractError(`${field} is not text`);
  return value;
}

function count(json: Json, field: string): number {
  const value = json[field];
  if (typeof value !== 'number' || !Number.isFinite(value) || value < 0) throw new ContractError(`${field} is not a count`);
  return Math.floor(value);
}

function instant(json: Json, field: string): number {
  const value = Date.parse(text(json, field));
  if (Number.isNaN(value)) throw new ContractError(`${field} is not a time`);
  return value;
}

function state(json: Json): SaleState {
  const value = json['state'];
  if (value === 'UPCOMING' || value === 'ACTIVE' || value === 'ENDED') return value;
  throw new ContractError('state is unknown');
}

export function decodeSale(value: unknown): Sale {
  const json = asObject(value);
  return {
    sku: text(json, 'sku'),
    productName: text(json, 'productName'),
    state: state(json),
    stock: count(json, 'stock'),
    initialStock: count(json, 'initialStock'),
    startTime: instant(json, 'startTime'),
    endTime: instant(json, 'endTime'),
  };
}

export function decodePurchase(value: unknown): Purchase {
  const json = asObject(value);
  return { purchaseNo: text(json, 'purchaseNo'), purchasedAt: text(json, 'purchasedAt') };
}

export function decodeProduct(value: unknown): Product {
  const json = asObject(value);
  return {
    sku: text(json, 'sku'),
    productName: text(json, 'productName'),
    initialStock: count(json, 'initialStock'),
    startTime: instant(json, 'startTime'),
    endTime: instant(json, 'endTime'),
    state: state(json),
    createdAt: text(json, 'createdAt'),
    ...(json['currentStock'] === undefined ? {} : { currentStock: count(json, 'currentStock') }),
    ...(json['totalPurchases'] === undefined ? {} : { totalPurchases: count(json, 'totalPurchases') }),
  };
}

export function decodeError(value: unknown): ApiError {
  const json = asObject(value);
  const error: ApiError = { code: text(json, 'code'), message: text(json, 'message') };
  if (typeof json['retryAfter'] === 'number') error.retryAfter = json['retryAfter'];
  if (json['fields'] !== undefined) {
    error.fields = Object.fromEntries(Object.entries(asObject(json['fields'])).map(([name, why]) => [name, String(why)]));
  }
  return error;
}

/** `null` for an event type that this page does not know: later servers may send more. */
export function decodeEvent(type: string, data: string): SaleEvent | null {
  if (type !== 'initial' && type !== 'stock-update' && type !== 'state-change') return null;
  const json = asObject(JSON.parse(data));
  const sku = text(json, 'sku');
  if (type === 'stock-update') return { type, sku, stock: count(json, 'stock') };
  if (type === 'state-change') {
    const reason = json['reason'];
    return { type, sku, state: state(json), ...(typeof reason === 'string' ? { reason } : {}) };
  }
  return {
    type,
    sku,
    state: state(json),
    stock: count(json, 'stock'),
    startTime: instant(json, 'startTime'),
    endTime: instant(json, 'endTime'),
  };
}
