import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { Answer, Api } from './api';
import { createServerClock } from './clock';
import type { Sale } from './contract';
import { POLL_MS, RESYNC_MS, SILENCE_MS, startFeed, turnDelay } from './feed';
import { withStatus } from './sale';

const sale: Sale = {
  sku: 'W-1', productName: 'Widget', state: 'ACTIVE', stock: 10, initialStock: 10, startTime: 0, endTime: 9e12,
};

/** A server whose streams the test writes to and cuts. */
function fakeServer() {
  const opened: { lastEventId: string | null; send(text: string): void; cut(): void }[] = [];
  let refusal: Response | null = null;
  const status = vi.fn(async (): Promise<Answer<Sale>> => ({ kind: 'ok', value: sale }));
  async function events(_sku: string | null, lastEventId: string | null, signal: AbortSignal): Promise<Response> {
    if (refusal) return refusal.clone();
    let control!: ReadableStreamDefaultController<Uint8Array>;
    const body = new ReadableStream<Uint8Array>({ start: (c) => void (control = c) });
    signal.addEventListener('abort', () => { try { control.error(new Error('aborted')); } catch { /* closed already */ } });
    opened.push({ lastEventId, send: (text) => control.enqueue(new TextEncoder().encode(text)), cut: () => control.close() });
    return new Response(body, { headers: { 'Content-Type': 'text/event-stream' } });
  }
  return { api: { sale: status, events } as unknown as Api, opened, status, refuse: (r: Response | null) => (refusal = r) };
}

const update = (id: number, stock: number) => `event: stock-update\nid: ${id}\ndata: {"sku":"W-1","stock":${stock}}\n\n`;

describe('the feed', () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  const start = (server: ReturnType<typeof fakeServer>) =>
    startFeed({ api: server.api, clock: createServerClock(() => Date.now()), sku: null, random: () => 0.5 });
  const settle = () => vi.advanceTimersByTimeAsync(10);

  it('goes live on the first bytes and follows events', async () => {
    const server = fakeServer();
    const feed = start(server);
    await settle();
    expect(feed.state.get()).toMatchObject({ phase: 'sale', link: 'connecting' });
    server.opened[0]!.send(update(1, 7));
    await settle();
    expect(feed.state.get()).toMatchObject({ link: 'live', view: { stock: 7 } });
    feed.stop();
  });

  it('resumes with Last-Event-ID and polls meanwhile', async () => {
    const server = fakeServer();
    const feed = start(server);
    await settle();
    server.opened[0]!.send(update(41, 7));
    await settle();
    server.refuse(new Response('', { status: 503 }));
    server.opened[0]!.cut();
    const before = server.status.mock.calls.length;
    await vi.advanceTimersByTimeAsync(3 * POLL_MS);
    expect(feed.state.get().link).toBe('polling');
    expect(server.status.mock.calls.length - before).toBeGreaterThanOrEqual(2);
    server.refuse(null);
    await vi.advanceTimersByTimeAsync(20_000);
    expect(server.opened[1]!.lastEventId).toBe('41');
    feed.stop();
  });

  it('gives up a stream that has gone silent', async () => {
    const server = fakeServer();
    const feed = start(server);
    await settle();
    server.opened[0]!.send(': heartbeat\n\n');
    await vi.advanceTimersByTimeAsync(SILENCE_MS - 100);
    expect(server.opened).toHaveLength(1);
    await vi.advanceTimersByTimeAsync(3000);
    expect(server.opened.length).toBeGreaterThan(1);
    feed.stop();
  });

  it('asks rarely while it is live', async () => {
    const server = fakeServer();
    const feed = start(server);
    await settle();
    server.opened[0]!.send(update(1, 9));
    await settle();
    const before = server.status.mock.calls.length;
    await vi.advanceTimersByTimeAsync(2 * RESYNC_MS + 100);
    expect(server.status.mock.calls.length - before).toBe(2);
    feed.stop();
  });

  it('waits as long as a refusing server asks', async () => {
    const server = fakeServer();
    server.refuse(new Response('', { status: 429, headers: { 'Retry-After': '30' } }));
    const feed = start(server);
    await settle();
    server.refuse(null);
    await vi.advanceTimersByTimeAsync(29_000);
    expect(server.opened).toHaveLength(0);
    await vi.advanceTimersByTimeAsync(2000);
    expect(server.opened).toHaveLength(1);
    feed.stop();
  });

  it('says when nothing can be reached, and recovers on wake', async () => {
    const server = fakeServer();
    server.status.mockResolvedValue({ kind: 'unreachable' });
    const feed = start(server);
    await settle();
    expect(feed.state.get()).toMatchObject({ phase: 'loading', link: 'offline' });
    server.status.mockResolvedValue({ kind: 'ok', value: sale });
    feed.wake();
    await settle();
    expect(feed.state.get().phase).toBe('sale');
    feed.stop();
  });

  it('survives an event that breaks the contract by starting the stream anew', async () => {
    const server = fakeServer();
    const feed = start(server);
    await settle();
    server.opened[0]!.send('event: stock-update\nid: 1\ndata: nonsense\n\n');
    await vi.advanceTimersByTimeAsync(2000);
    expect(server.opened.length).toBeGreaterThan(1);
    feed.stop();
  });
});

describe('a turn that is due', () => {
  const view = withStatus(null, { ...sale, state: 'UPCOMING', startTime: 10_000, endTime: 20_000 });
  it('is asked about shortly after its time, spread over half a second', () => {
    expect(turnDelay(view, 4_000, () => 0)).toBe(6_200);
    expect(turnDelay(view, 4_000, () => 1)).toBe(6_700);
    expect(turnDelay({ ...view, state: 'ACTIVE' }, 19_000, () => 0)).toBe(1_200);
  });
  it('that is late is asked about every second, an end never', () => {
    expect(turnDelay(view, 11_000, () => 0.5)).toBe(1000);
    expect(turnDelay({ ...view, state: 'ENDED' }, 0, () => 0)).toBeNull();
  });
});
