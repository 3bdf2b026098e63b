// What the page relies on, asked of the server without a browser. The mock passes it; so must the real server.
import { describe, expect, it } from 'vitest';
import { createParser } from '../src/sse';
import type { StreamEvent } from '../src/sse';
import { ADMIN_KEY, activeSale, buyElsewhere, createSale, canFail, someone, useServer } from './harness';

const server = useServer();

const get = (path: string, headers: Record<string, string> = {}) => fetch(`${server.url}${path}`, { headers });
const post = (path: string, body: unknown, headers: Record<string, string> = {}) =>
  fetch(`${server.url}${path}`, { method: 'POST', headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify(body) });

/** Reads events until one has this type. */
async function eventsUntil(type: string, sku: string, lastEventId?: string): Promise<{ list: StreamEvent[]; id: string | null }> {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(new Error(`no ${type} within 30 s`)), 30_000);
  try {
    const response = await fetch(`${server.url}/api/v1/sales/events?sku=${sku}`, {
      headers: { Accept: 'text/event-stream', ...(lastEventId ? { 'Last-Event-ID': lastEventId } : {}) },
      signal: abort.signal,
    });
    expect(response.headers.get('content-type')).toMatch(/^text\/event-stream/);
    const parser = createParser();
    const list: StreamEvent[] = [];
    const decoder = new TextDecoder();
    for await (const chunk of response.body ?? []) {
      list.push(...parser.push(decoder.decode(chunk, { stream: true })));
      if (list.some((event) => event.type === type)) break;
    }
    return { list, id: parser.lastEventId() };
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}

describe('GET /api/v1/sales', () => {
  it('has every field, a Date header for the countdown and a second of cache', async () => {
    const sku = await activeSale(server, { stock: 3 });
    const response = await get(`/api/v1/sales?sku=${sku}`);
    expect(Date.parse(response.headers.get('date') ?? '')).not.toBeNaN();
    expect(response.headers.get('cache-control')).toBe('public, max-age=1');
    expect(await response.json()).toEqual({
      success: true,
      data: {
        sku,
        state: 'ACTIVE',
        stock: 3,
        initialStock: 3,
        productName: 'Limited Edition Widget',
        startTime: expect.stringMatching(/Z$/),
        endTime: expect.stringMatching(/Z$/),
        endReason: null,
      },
    });
  });

  it('is 404 in the envelope for an unknown sku', async () => {
    const response = await get('/api/v1/sales?sku=NOT-THERE');
    expect(response.status).toBe(404);
    expect(await response.json()).toMatchObject({ success: false, error: { code: 'NOT_FOUND' } });
  });
});

describe('purchases', () => {
  it('are 200 with a code when denied', async () => {
    const upcoming = await createSale(server, { startsInMs: 60_000 });
    const early = await post('/api/v1/purchases', { sku: upcoming, qty: 1 }, { 'X-User-Id': someone() });
    expect([early.status, await early.json()]).toMatchObject([200, { success: false, error: { code: 'SALE_NOT_ACTIVE' } }]);
  });

  it('are readable at once, and per sale', async () => {
    const [sku, other] = [await activeSale(server), await activeSale(server)];
    const buyer = someone();
    const purchaseNo = await buyElsewhere(server, sku, buyer);
    expect(await (await get(`/api/v1/purchases?sku=${sku}`, { 'X-User-Id': buyer })).json()).toMatchObject({ success: true, data: { purchaseNo } });
    expect((await get(`/api/v1/purchases?sku=${other}`, { 'X-User-Id': buyer })).status).toBe(404);
  });

  it('from one buyer in the same second are 429 with the same wait in header and body', async () => {
    const sku = await activeSale(server);
    const buyer = someone();
    await buyElsewhere(server, sku, buyer);
    const again = await post('/api/v1/purchases', { sku, qty: 1 }, { 'X-User-Id': buyer });
    expect(again.status).toBe(429);
    const body = (await again.json()) as { error: { code: string; retryAfter: number } };
    expect(body.error.code).toBe('RATE_LIMITED');
    expect(body.error.retryAfter).toBe(Number(again.headers.get('retry-after')));
    expect(body.error.retryAfter).toBeGreaterThanOrEqual(1);
  });

  it('without a buyer are 400 and name the header', async () => {
    const sku = await activeSale(server);
    const response = await post('/api/v1/purchases', { sku, qty: 1 });
    expect(response.status).toBe(400);
    expect(await response.json()).toMatchObject({ error: { code: 'VALIDATION_ERROR', fields: { 'X-User-Id': expect.any(String) } } });
  });
});

describe('the event stream', () => {
  it('begins with the state, tells purchases, and replays what was missed', async () => {
    const sku = await activeSale(server, { stock: 2 });
    const first = await eventsUntil('initial', sku);
    expect(first.list.map((event) => event.type)).toEqual(['initial']);
    expect(JSON.parse(first.list[0]?.data ?? '')).toMatchObject({ sku, state: 'ACTIVE', stock: 2 });
    expect(first.id).not.toBeNull();
    await buyElsewhere(server, sku);
    await buyElsewhere(server, sku);
    const missed = await eventsUntil('state-change', sku, first.id ?? '');
    expect(missed.list.map((event) => [event.type, JSON.parse(event.data) as object])).toEqual([
      ['stock-update', { sku, stock: 1 }],
      ['stock-update', { sku, stock: 0 }],
      ['state-change', { sku, state: 'ENDED', reason: 'SOLD_OUT' }],
    ]);
  });

  it('begins with the state again where nothing can be replayed', async () => {
    const sku = await activeSale(server, { stock: 2 });
    await buyElsewhere(server, sku);
    const { list } = await eventsUntil('initial', sku, 'an-id-of-nobody');
    expect(list.map(({ type }) => type)).toEqual(['initial']);
    expect(JSON.parse(list[0]?.data ?? '')).toMatchObject({ sku, state: 'ACTIVE', stock: 1 });
  });
});

describe('products', () => {
  it.each(['GET', 'PUT', 'DELETE'])('%s without the key is 401', async (method) => {
    const response = await fetch(`${server.url}/api/v1/products/ANY`, { method });
    expect([response.status, await response.json()]).toMatchObject([401, { success: false, error: { code: 'UNAUTHORIZED' } }]);
  });

  it('that run cannot be changed', async () => {
    const sku = await activeSale(server);
    const response = await fetch(`${server.url}/api/v1/products/${sku}`, {
      method: 'PUT',
      headers: { 'X-Admin-Key': ADMIN_KEY, 'Content-Type': 'application/json' },
      body: JSON.stringify({ initialStock: 99 }),
    });
    expect([response.status, await response.json()]).toMatchObject([200, { success: false, error: { code: 'SALE_NOT_MODIFIABLE' } }]);
  });
});

describe('the page', () => {
  it('is served with a strict policy, revalidated, and its assets for ever', async () => {
    const page = await get('/sale/');
    expect(page.headers.get('content-type')).toMatch(/^text\/html/);
    expect(page.headers.get('content-security-policy')).toContain("script-src 'self'");
    expect(page.headers.get('content-security-policy')).not.toContain('unsafe');
    expect(page.headers.get('cache-control')).toBe('no-cache');
    const asset = /src="\.\/(assets\/[^"]+)"/.exec(await page.text())?.[1];
    expect((await get(`/sale/${asset}`)).headers.get('cache-control')).toContain('immutable');
  });

  it.runIf(canFail)('is not a way out of its folder', async () => {
    expect((await get('/sale/..%2fpackage.json')).status).toBe(404);
  });
});
