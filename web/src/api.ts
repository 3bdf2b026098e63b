// The calls. Each gives an `Answer`: a value, a refusal in the server's own words, or "unreachable", which covers
// everything that leaves us without a contract-shaped answer. Nothing here throws on what a server may send.
import { ContractError, asObject, decodeError, decodeProduct, decodePurchase, decodeSale } from './contract';
import type { ApiError, Product, Purchase, Sale } from './contract';
import type { Proof } from './challenge';
import type { ServerClock } from './clock';

export type Answer<T> =
  | { kind: 'ok'; value: T }
  | { kind: 'refused'; status: number; error: ApiError; retryAfterMs: number }
  | { kind: 'unreachable' };

export interface ProductFields {
  sku: string;
  productName: string;
  initialStock: number;
  startTime: string;
  endTime: string;
}

const TIMEOUT_MS = 10_000;

type Fetch = typeof fetch;

export interface Api {
  sale(sku: string | null): Promise<Answer<Sale>>;
  /** `proof` is from the challenge of buyers, where there is one. */
  buy(sku: string, userId: string, proof: Proof | null): Promise<Answer<Purchase>>;
  purchase(sku: string, userId: string): Promise<Answer<Purchase>>;
  /** The raw stream; its reader is in `feed.ts`. */
  events(sku: string | null, lastEventId: string | null, signal: AbortSignal): Promise<Response>;
  products(key: string): Promise<Answer<Product[]>>;
  product(key: string, sku: string): Promise<Answer<Product>>;
  createProduct(key: string, fields: ProductFields): Promise<Answer<Product>>;
  updateProduct(key: string, sku: string, fields: Partial<ProductFields>): Promise<Answer<Product>>;
  resetProduct(key: string, sku: string): Promise<Answer<string>>;
}

export function retryAfterMs(response: Response, error: ApiError): number {
  const seconds = error.retryAfter ?? Number(response.headers.get('retry-after') ?? 0);
  return Number.isFinite(seconds) && seconds > 0 ? seconds * 1000 : 0;
}

async function read<T>(response: Response, decode: (data: unknown) => T): Promise<Answer<T>> {
  const body = asObject(await response.json().catch(() => ({})));
  if (body['success'] === true) return { kind: 'ok', value: decode(body['data']) };
  const error = body['error'] === undefined ? fromProxy(response) : decodeError(body['error']);
  return { kind: 'refused', status: response.status, error, retryAfterMs: retryAfterMs(response, error) };
}

/** A proxy in front refuses in its own words; its status still says enough. */
function fromProxy(response: Response): ApiError {
  if (response.status === 429) return { code: 'RATE_LIMITED', message: 'Too many requests.' };
  if (response.status >= 500) return { code: 'SERVICE_UNAVAILABLE', message: 'The service is unavailable.' };
  throw new ContractError(`${response.status} without an envelope`);
}

function path(base: string, sku: string | null): string {
  return sku === null ? base : `${base}?sku=${encodeURIComponent(sku)}`;
}

function decodeList(data: unknown): Product[] {
  const items = asObject(data)['items'];
  if (!Array.isArray(items)) throw new ContractError('items is not a list');
  return items.map(decodeProduct);
}

/** `token` names the buyer, where tokens do. */
export function createApi(clock: ServerClock, fetcher: Fetch = (...args) => fetch(...args), token: string | null = null): Api {
  const buyer = (userId: string): Record<string, string> =>
    token === null ? { 'X-User-Id': userId } : { Authorization: `Bearer ${token}` };

  async function call<T>(url: string, init: RequestInit, decode: (data: unknown) => T): Promise<Answer<T>> {
    try {
      const sentAt = clock.local();
      const response = await fetcher(url, { cache: 'no-store', signal: AbortSignal.timeout(TIMEOUT_MS), ...init });
      clock.observe(response, sentAt);
      return await read(response, decode);
    } catch {
      return { kind: 'unreachable' };
    }
  }

  function admin(key: string, method: string, body?: object): RequestInit {
    const headers: Record<string, string> = { 'X-Admin-Key': key };
    if (body === undefined) return { method, headers };
    return { method, headers: { ...headers, 'Content-Type': 'application/json' }, body: JSON.stringify(body) };
  }

  const productPath = (sku: string) => `/api/v1/products/${encodeURIComponent(sku)}`;

  return {
    // Without `no-store`: a status a second old is what caches on the way are for.
    sale: (sku) => call(path('/api/v1/sales', sku), { cache: 'default' }, decodeSale),
    buy: (sku, userId, proof) =>
      call(
        '/api/v1/purchases',
        {
          method: 'POST',
          headers: { ...buyer(userId), 'Content-Type': 'application/json' },
          body: JSON.stringify({ sku, qty: 1, ...(proof && { challengeToken: proof.token, challengeKind: proof.kind }) }),
        },
        decodePurchase,
      ),
    purchase: (sku, userId) => call(path('/api/v1/purchases', sku), { headers: buyer(userId) }, decodePurchase),
    async events(sku, lastEventId, signal) {
      const headers: Record<string, string> = { Accept: 'text/event-stream' };
      if (lastEventId !== null) headers['Last-Event-ID'] = lastEventId;
      const sentAt = clock.local();
      const response = await fetcher(path('/api/v1/sales/events', sku), { headers, signal, cache: 'no-store' });
      clock.observe(response, sentAt);
      return response;
    },
    products: (key) => call('/api/v1/products', admin(key, 'GET'), decodeList),
    product: (key, sku) => call(productPath(sku), admin(key, 'GET'), decodeProduct),
    createProduct: (key, fields) => call('/api/v1/products', admin(key, 'POST', fields), decodeProduct),
    updateProduct: (key, sku, fields) => call(productPath(sku), admin(key, 'PUT', fields), decodeProduct),
    resetProduct: (key, sku) => call(productPath(sku), admin(key, 'DELETE'), (data) => String(asObject(data)['message'] ?? '')),
  };
}
