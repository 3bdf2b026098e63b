// The client: one method per call, by capability.
import { Transport, WeirError, jitter, sleep } from './http.js';
import type { Answer, Call, CallOptions, Options } from './http.js';
import { events } from './sse.js';
import type { StreamOptions } from './sse.js';
import type * as wire from './types.js';

export { WeirError } from './http.js';
export type { Call, CallOptions, Options } from './http.js';
export type { StreamOptions } from './sse.js';
export type * from './types.js';
export { WebhookError, verifyWebhook } from './webhook.js';
export type { Webhook, WebhookOptions } from './webhook.js';

export interface KeyedOptions extends CallOptions {
  /** Made for each call unless given. Give your own where the call may be made again after a restart. */
  idempotencyKey?: string;
}

const BULK_LINES = 1_000;
const LONG_POLL_MS = 20_000;
const FINAL: readonly string[] = ['COMPLETED', 'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED', 'CANCELLED'];
const isFinal = (state: wire.RequestState): state is wire.RequestState<wire.FinalStatus> => FINAL.includes(state.status);
const segment = encodeURIComponent;
/** `bulk`, `forecast` and `windows` are routes, so an event of that name is asked for as `%62ulk`. */
const slotPath = (id: string) => `/api/v1/slots/${/^(bulk|forecast|windows)$/.test(id) ? `%${id.charCodeAt(0).toString(16)}${id.slice(1)}` : segment(id)}`;

export class WeirClient {
  readonly #transport: Transport;

  constructor(options: Options) {
    this.#transport = new Transport(options);
  }

  /** Any other route. A POST is repeated after a lost answer only with `repeatable: true`. */
  call<T>(method: string, path: string, call: Call = {}): Promise<T> {
    return this.#transport.call(method, path, call, ({ text }) => (text === '' ? undefined : JSON.parse(text)) as T);
  }

  #post<T>(path: string, body: unknown, call: Call, repeatable: boolean): Promise<T> {
    return this.call<T>('POST', path, { ...call, body, repeatable });
  }

  readonly quota = {
    /** Begins a new window, so it is repeated after a lost answer only with `keepCount`. */
    configure: (config: wire.QuotaConfig, options: CallOptions = {}) =>
      this.#post<wire.Quota>('/api/config', config, options, config.keepCount === true),
    get: (userId: string, options: CallOptions = {}) => this.call<wire.Quota>('GET', `/api/config/${segment(userId)}`, options),
    remove: (userId: string, options: CallOptions = {}) => this.call<void>('DELETE', `/api/config/${segment(userId)}`, options),
    send: (userId: string, message: string, options: KeyedOptions = {}) => {
      const idempotencyKey = options.idempotencyKey ?? crypto.randomUUID();
      const headers = { 'Idempotency-Key': `"${idempotencyKey}"` };
      return this.#post<wire.Sent>('/api/send', { userId, message }, { ...options, headers, idempotencyKey }, true);
    },
  };

  readonly slots = {
    assign: (event: wire.SlotEvent, options: CallOptions = {}) => this.#post<wire.Slot>('/api/v1/slots', event, options, true),
    get: (eventId: string, options: CallOptions = {}) => this.call<wire.Slot>('GET', slotPath(eventId), options),
    remove: (eventId: string, options: CallOptions = {}) => this.call<void>('DELETE', slotPath(eventId), options),
    /** Answers in the order of the events, uploaded 1,000 at a time. The deadline is that of each upload. */
    bulk: (all: Iterable<wire.SlotEvent> | AsyncIterable<wire.SlotEvent>, options: CallOptions = {}) => this.#bulk(all, options),
  };

  async *#bulk(all: Iterable<wire.SlotEvent> | AsyncIterable<wire.SlotEvent>, options: CallOptions): AsyncGenerator<wire.Slot | wire.SlotFailure, void> {
    let before = 0;
    let batch: wire.SlotEvent[] = [];
    for await (const event of all) {
      if (batch.push(event) < BULK_LINES) continue;
      yield* await this.#upload(batch, before, options);
      before += batch.length;
      batch = [];
    }
    if (batch.length > 0) yield* await this.#upload(batch, before, options);
  }

  /** Uploads again what the server could not decide at the moment. */
  async #upload(batch: wire.SlotEvent[], before: number, options: CallOptions): Promise<(wire.Slot | wire.SlotFailure)[]> {
    const end = performance.now() + (options.deadlineMs ?? this.#transport.deadlineMs);
    const answers = new Array<wire.Slot | wire.SlotFailure>(batch.length);
    let open = batch.map((_, index) => index);
    for (let attempt = 0; ; attempt += 1) {
      const body = open.map((index) => `${JSON.stringify(batch[index])}\n`).join('');
      const headers = { 'Content-Type': 'application/x-ndjson' };
      const left = Math.max(1, end - performance.now());
      const call = { ...options, body, headers, repeatable: true, deadlineMs: left, attemptMs: left };
      const lines = await this.#transport.call('POST', '/api/v1/slots/bulk', call, (answer) => readLines(answer, open.length));
      open = open.filter((index, at) => {
        const line = lines[at] as wire.Slot | wire.SlotFailure;
        answers[index] = 'code' in line ? { ...line, line: before + index + 1 } : line;
        return 'code' in line && line.code === 'DEPENDENCY_UNAVAILABLE';
      });
      const wait = 500 + jitter(attempt);
      if (open.length === 0 || performance.now() + wait >= end) return answers;
      await sleep(wait, options.signal);
    }
  }

  readonly limits = {
    /** One decision about all checks. Not repeated after a lost answer unless it spends nothing. */
    check: (checks: wire.Check | wire.Check[], { peek, explain, ...options }: wire.CheckOptions & CallOptions = {}) => {
      const list = Array.isArray(checks) ? checks : [checks];
      return this.#post<wire.Decision>('/v1/check', { checks: list, peek, explain }, options, peek === true || list.every(({ cost }) => cost === 0));
    },
    /** Not repeated after a lost answer: the first hold would be spent when it expires. */
    hold: (check: Required<wire.Check>, { ttl, ...options }: CallOptions & { ttl?: string } = {}) =>
      this.#post<wire.Hold>('/v1/hold', { ...check, ttl }, options, false),
    settle: (holdId: string, cost: number, options: CallOptions = {}) => this.#post<wire.Settled>('/v1/settle', { holdId, cost }, options, true),
    release: (permitId: string, options: CallOptions = {}) => this.#post<wire.Released>('/v1/release', { permitId }, options, true),
  };

  readonly requests = {
    submit: (submission: wire.Submission, options: KeyedOptions = {}) => {
      const idempotencyKey = options.idempotencyKey ?? crypto.randomUUID();
      return this.#post<wire.Accepted>('/v1/requests', { ...submission, idempotencyKey }, { ...options, idempotencyKey }, true);
    },
    get: (requestId: string, options: CallOptions = {}) => this.call<wire.RequestState>('GET', `/v1/requests/${segment(requestId)}`, options),
    /** Waits for the end: `NOT_FINAL` if there is none after `waitMs` (60,000). */
    wait: (requestId: string, options: CallOptions & { waitMs?: number } = {}) => this.#wait(requestId, options),
    submitAndWait: async (submission: wire.Submission, { waitMs, ...options }: KeyedOptions & { waitMs?: number } = {}) => {
      const idempotencyKey = options.idempotencyKey ?? crypto.randomUUID();
      const { requestId } = await this.requests.submit(submission, { ...options, idempotencyKey });
      try {
        return await this.#wait(requestId, { ...options, ...(waitMs !== undefined && { waitMs }) });
      } catch (error) {
        if (error instanceof WeirError) error.idempotencyKey = idempotencyKey;
        throw error;
      }
    },
    /** Succeeds too if it was cancelled before, as by an attempt whose answer was lost. */
    cancel: async (requestId: string, options: CallOptions = {}): Promise<{ requestId: string; status: 'CANCELLED' }> => {
      try {
        return await this.#post('/v1/requests/' + segment(requestId) + '/cancel', undefined, options, true);
      } catch (error) {
        if (!(error instanceof WeirError) || error.code !== 'ALREADY_FINAL') throw error;
        if ((await this.requests.get(requestId, options)).status !== 'CANCELLED') throw error;
        return { requestId, status: 'CANCELLED' };
      }
    },
  };

  /** Asks by long polls, and without waiting where the server has no place left for one more caller that waits. */
  async #wait(requestId: string, options: CallOptions & { waitMs?: number }): Promise<wire.RequestState<wire.FinalStatus>> {
    const end = performance.now() + (options.waitMs ?? 60_000);
    let before: wire.RequestStatus | undefined;
    for (let attempt = 0; ; attempt += 1) {
      const left = Math.max(0, end - performance.now());
      const waitMs = Math.min(LONG_POLL_MS, Math.floor(left));
      const path = `/v1/requests/${segment(requestId)}`;
      const began = performance.now();
      let state: wire.RequestState;
      try {
        const query = { wait: waitMs > 0 ? `${waitMs}ms` : undefined };
        const limits = { deadlineMs: waitMs + this.#transport.attemptMs, attemptMs: waitMs + this.#transport.attemptMs };
        // Its own repetitions would wait again, so the first 503 ends it.
        state = await this.#transport.call('GET', path, { ...options, ...limits, query, repeatable: false }, ({ text }) => JSON.parse(text));
      } catch (error) {
        if (!(error instanceof WeirError) || !error.outcomeUnknown) throw error;
        state = await this.requests.get(requestId, options);
      }
      if (isFinal(state)) return state;
      if (performance.now() >= end) throw new WeirError('NOT_FINAL', `request ${requestId} is still ${state.status}`);
      const early = performance.now() - began < waitMs / 2;
      if (early && state.status === before) await sleep(Math.min(50 + jitter(attempt), Math.max(0, end - performance.now())), options.signal);
      before = state.status;
    }
  }

  readonly sales = {
    status: async (sku?: string, options: CallOptions = {}) =>
      (await this.call<{ data: wire.Sale }>('GET', '/api/v1/sales', { ...options, query: { sku } })).data,
    purchase: async (sku: string, userId: string, options: CallOptions = {}) =>
      (await this.call<{ data: wire.Purchase }>('GET', '/api/v1/purchases', { ...options, query: { sku }, headers: { 'X-User-Id': userId } })).data,
    /** One attempt to buy. Safe to repeat: a buyer has one unit at most. */
    attempt: async (sku: string, userId: string, { challengeToken, ...options }: CallOptions & { challengeToken?: string } = {}): Promise<wire.PurchaseOutcome> => {
      type Body = { success: true; data: wire.Purchase } | { success: false; error: { code: string; message: string } };
      const call = { ...options, headers: { 'X-User-Id': userId } };
      const body = await this.#post<Body>('/api/v1/purchases', { sku, qty: 1, challengeToken }, call, true);
      if (body.success) return { outcome: 'PURCHASED', purchase: body.data };
      const { code, message } = body.error;
      if (code === 'ALREADY_PURCHASED') return { outcome: code, purchase: await this.sales.purchase(sku, userId, options) };
      if (code === 'SOLD_OUT' || code === 'SALE_NOT_ACTIVE' || code === 'CHALLENGE_REQUIRED') return { outcome: code, message };
      throw new WeirError(code, message, { status: 200 });
    },
    /** The events of a sale until the caller leaves the loop; resumed after the last one wherever the stream breaks. */
    events: async function* (this: WeirClient, sku: string | undefined, options: StreamOptions = {}): AsyncGenerator<wire.SaleEvent, void> {
      for await (const { type, id, data } of events(this.#transport, '/api/v1/sales/events', { sku }, options)) {
        yield { type, id, data: JSON.parse(data) } as wire.SaleEvent;
      }
    }.bind(this),
  };
}

function readLines({ text }: Answer, count: number): (wire.Slot | wire.SlotFailure)[] {
  const lines = text.split('\n').filter((line) => line !== '');
  if (lines.length !== count) throw new Error(`${lines.length} answers to ${count} events`);
  return lines.map((line) => JSON.parse(line) as wire.Slot | wire.SlotFailure);
}
