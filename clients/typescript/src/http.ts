// One call to the server, repeated as often as is safe and its time allows; and the error that it ends with.
import type { ErrorCode } from './types.js';

export interface Options {
  /** Such as `https://weir.example`. */
  url: string;
  /** A bearer token, or what gives a valid one before each attempt. */
  token?: string | (() => string | Promise<string>);
  adminKey?: string;
  /** How long a call may take with all its attempts; waits that would go beyond it are not begun. 15,000 unless given. */
  deadlineMs?: number;
  /** How long one attempt may take: then the connection counts as dead. 5,000 unless given. */
  attemptMs?: number;
  fetch?: typeof fetch;
}
export interface CallOptions {
  deadlineMs?: number;
  signal?: AbortSignal;
}
export interface Call extends CallOptions {
  query?: Record<string, string | undefined>;
  headers?: Record<string, string>;
  /** A string is sent as it is, anything else as JSON. */
  body?: unknown;
  /** Whether the call may be sent again when nobody knows if it was done. GET, PUT and DELETE are unless this is `false`. */
  repeatable?: boolean;
  attemptMs?: number;
  idempotencyKey?: string;
}
export interface Answer {
  status: number;
  headers: Headers;
  text: string;
}

export class WeirError extends Error {
  override readonly name = 'WeirError';
  readonly code: ErrorCode;
  /** 0 where no answer came. */
  readonly status: number;
  readonly requestId: string | null;
  /** When the server says that a repetition can succeed. */
  readonly retryAfterMs: number | null;
  /** Whether the call may have been done all the same. */
  readonly outcomeUnknown: boolean;
  /** Of calls that have one: with it the call can be repeated later without being done twice. */
  idempotencyKey?: string;

  constructor(code: ErrorCode, message: string, rest: Partial<WeirError> = {}) {
    super(message, rest.cause === undefined ? {} : { cause: rest.cause });
    this.code = code;
    this.status = rest.status ?? 0;
    this.requestId = rest.requestId ?? null;
    this.retryAfterMs = rest.retryAfterMs ?? null;
    this.outcomeUnknown = rest.outcomeUnknown ?? false;
  }
}

const RETRIED = new Set([408, 425, 429, 500, 502, 503, 504]);
const NEVER_SENT = new Set([
  'bad port', // Of those that the Fetch standard blocks; without a code.
  'ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH', 'UND_ERR_CONNECT_TIMEOUT',
]);
const FIRST_WAIT_MS = 100;
const LONGEST_WAIT_MS = 5_000;

/** Full jitter: anything up to a bound that doubles with each attempt. */
export const jitter = (attempt: number) => Math.random() * Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** attempt);

/** What timers take: they refuse fractions, and end at once after more than 2³¹ ms. */
export const timerMs = (ms: number) => Math.min(Math.max(1, Math.ceil(ms)), 2 ** 31 - 1);

export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((done, failed) => {
    signal?.throwIfAborted();
    const abort = () => (clearTimeout(timer), failed(signal?.reason));
    const timer = setTimeout(() => (signal?.removeEventListener('abort', abort), done()), timerMs(ms));
    signal?.addEventListener('abort', abort, { once: true });
  });
}

export class Transport {
  readonly #options: Options;
  readonly #url: string;
  readonly deadlineMs: number;
  readonly attemptMs: number;

  constructor(options: Options) {
    this.#options = options;
    this.#url = options.url.replace(/\/+$/, '');
    this.deadlineMs = options.deadlineMs ?? 15_000;
    this.attemptMs = options.attemptMs ?? 5_000;
  }

  async headers(call: Call): Promise<Headers> {
    const { token, adminKey } = this.#options;
    const headers = new Headers(call.headers);
    const bearer = typeof token === 'function' ? await token() : token;
    if (bearer !== undefined) headers.set('Authorization', `Bearer ${bearer}`);
    if (adminKey !== undefined) headers.set('X-Admin-Key', adminKey);
    if (call.body !== undefined && !headers.has('Content-Type')) headers.set('Content-Type', 'application/json');
    return headers;
  }

  /** Opens one response. An answer that is no success is read and thrown. */
  async open(method: string, path: string, headers: Headers, call: Call, signal: AbortSignal): Promise<Response> {
    const query = new URLSearchParams(Object.entries(call.query ?? {}).filter((pair): pair is [string, string] => pair[1] !== undefined));
    const init: RequestInit = { method, headers, signal, redirect: 'manual' };
    if (call.body !== undefined) init.body = call.body as string;
    const response = await (this.#options.fetch ?? fetch)(`${this.#url}${path}${query.size > 0 ? `?${query}` : ''}`, init);
    if (!response.ok) throw refusal(response, await response.text());
    return response;
  }

  async #attempt(method: string, path: string, call: Call, timeMs: number): Promise<Answer> {
    const headers = await this.headers(call);
    const timeout = AbortSignal.timeout(timerMs(timeMs));
    try {
      const response = await this.open(method, path, headers, call, call.signal ? AbortSignal.any([call.signal, timeout]) : timeout);
      return { status: response.status, headers: response.headers, text: await response.text() };
    } catch (error) {
      throw failure(error, call.signal);
    }
  }

  /** `read` throws where the answer is cut short or not what it should be; that counts as no answer. */
  async call<T>(method: string, path: string, given: Call, read: (answer: Answer) => T): Promise<T> {
    const body = given.body === undefined || typeof given.body === 'string' ? given.body : JSON.stringify(given.body);
    const call = { ...given, body };
    const repeatable = call.repeatable ?? ['GET', 'PUT', 'DELETE'].includes(method);
    const end = performance.now() + (call.deadlineMs ?? this.deadlineMs);
    for (let attempt = 0; ; attempt += 1) {
      const left = Math.max(1, end - performance.now());
      let error: WeirError;
      try {
        const answer = await this.#attempt(method, path, call, Math.min(left, call.attemptMs ?? this.attemptMs));
        return parse(answer, read);
      } catch (thrown) {
        if (!(thrown instanceof WeirError)) throw thrown;
        error = thrown;
      }
      if (call.idempotencyKey !== undefined) error.idempotencyKey = call.idempotencyKey;
      const transient = (RETRIED.has(error.status) && error.code !== 'SLOTS_EXHAUSTED') || error.code === 'NO_CONNECTION' || error.outcomeUnknown;
      const wait = (error.retryAfterMs ?? 0) + jitter(attempt);
      const safe = repeatable || !error.outcomeUnknown;
      if (!transient || !safe || performance.now() + wait >= end) throw error;
      await sleep(wait, call.signal);
    }
  }
}

function parse<T>(answer: Answer, read: (answer: Answer) => T): T {
  try {
    return read(answer);
  } catch (cause) {
    const { status, headers } = answer;
    const requestId = headers.get('X-Request-Id');
    throw new WeirError('UNEXPECTED_ANSWER', `the answer cannot be read: ${String(cause)}`, { status, requestId, outcomeUnknown: true, cause });
  }
}

function failure(error: unknown, signal: AbortSignal | undefined): unknown {
  if (error instanceof WeirError || signal?.aborted) return error;
  const reason = (error as Error).cause as { code?: string; message?: string } | undefined;
  const neverSent = NEVER_SENT.has(reason?.code ?? reason?.message ?? '');
  const what = neverSent ? 'cannot connect' : 'no answer, so the outcome is unknown';
  return new WeirError(neverSent ? 'NO_CONNECTION' : 'NO_ANSWER', `${what}: ${reason?.message || reason?.code || (error as Error).message}`, {
    outcomeUnknown: !neverSent,
    cause: error,
  });
}

/** Both forms of error bodies: the flat one, and that of sale. 429 and most of 4xx say that nothing was done; 5xx do not. */
function refusal(response: Response, text: string): WeirError {
  const { status, headers } = response;
  let body: { code?: string; message?: string } = {};
  try {
    const json = JSON.parse(text);
    body = (typeof json.error === 'object' ? json.error : json) ?? {};
  } catch {
    // Of a proxy in between.
  }
  const seconds = Number(headers.get('Retry-After') || NaN);
  return new WeirError(body.code ?? 'UNEXPECTED_ANSWER', body.message ?? `HTTP ${status}`, {
    status,
    requestId: headers.get('X-Request-Id'),
    retryAfterMs: Number.isFinite(seconds) ? seconds * 1000 : null,
    outcomeUnknown: status >= 500 || status === 408,
  });
}
