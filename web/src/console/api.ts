// The console's calls. A call gives the body or throws an `ApiFailure`, which says what the server said.

export interface Credential {
  header: 'Authorization' | 'X-Admin-Key';
  value: string;
}

/** A token has three parts with dots between them; anything else is taken for the admin key. */
export function credentialOf(text: string): Credential {
  const bare = text.trim().replace(/^Bearer\s+/i, '');
  if (/^[\w-]+\.[\w-]+\.[\w-]+$/.test(bare)) return { header: 'Authorization', value: `Bearer ${bare}` };
  return { header: 'X-Admin-Key', value: bare };
}

export class ApiFailure extends Error {
  constructor(
    /** 0 if there was no answer. */
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

export const TIMEOUT_MS = 15_000;

export interface Api {
  get<T>(path: string): Promise<T>;
  send<T>(method: 'POST' | 'PUT' | 'DELETE', path: string, body?: object): Promise<T>;
  /** The raw response, for streams and for what the answer's status alone says. */
  raw(path: string, init?: RequestInit): Promise<Response>;
}

type Fetch = (input: string, init?: RequestInit) => Promise<Response>;

interface Refusal {
  code?: string;
  message?: string;
  fields?: Record<string, string>;
}

/** Both error formats: flat, and the envelope of sale. */
async function failure(response: Response): Promise<ApiFailure> {
  const body = ((await response.json().catch(() => ({}))) ?? {}) as Refusal & { error?: Refusal | string };
  const refusal: Refusal = typeof body.error === 'object' ? body.error : body;
  const fields = Object.entries(refusal.fields ?? {}).map(([name, problem]) => `${name} ${problem}`);
  const message = [refusal.message ?? `The server answered ${response.status}.`, ...fields].join(' ');
  return new ApiFailure(response.status, refusal.code ?? 'UNKNOWN', message);
}

export function createApi(credential: Credential, onSignedOut: () => void, fetcher: Fetch = (...args) => fetch(...args)): Api {
  async function raw(path: string, init: RequestInit = {}): Promise<Response> {
    const headers = { ...(init.headers as Record<string, string> | undefined), [credential.header]: credential.value };
    let response: Response;
    try {
      response = await fetcher(path, { cache: 'no-store', signal: AbortSignal.timeout(TIMEOUT_MS), ...init, headers });
    } catch {
      throw new ApiFailure(0, 'UNREACHABLE', 'The server does not answer.');
    }
    if (response.status === 401) onSignedOut();
    return response;
  }

  async function call<T>(path: string, init?: RequestInit): Promise<T> {
    const response = await raw(path, init);
    if (!response.ok) throw await failure(response);
    if (response.status === 204) return undefined as T;
    const body = (await response.json().catch(() => {
      throw new ApiFailure(0, 'UNREADABLE', 'The answer could not be read.');
    })) as { success?: boolean; data?: unknown };
    // Routes of sale wrap what they answer.
    return (body.success === true && 'data' in body ? body.data : body) as T;
  }

  return {
    raw,
    get: (path) => call(path),
    send: (method, path, body) =>
      call(path, {
        method,
        ...(body === undefined ? {} : { headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) }),
      }),
  };
}

/** `/a?b=c` of a path and what is given of its parameters. */
export function withQuery(path: string, parameters: Record<string, string | number | boolean | null | undefined>): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== '') query.set(name, String(value));
  }
  const text = query.toString();
  return text === '' ? path : `${path}?${text}`;
}

export const part = encodeURIComponent;

export interface Page<T> {
  items: T[];
  nextCursor: string | null;
}

export interface NearLimit {
  capability: string;
  limitName: string;
  key: string;
  limit: number;
  remaining: number;
  at: string;
  until: string | null;
  denials: number;
  lastDenial: { at: string; limit: number; remaining: number; until: string | null } | null;
}

export interface KeyState {
  key: string;
  quota: {
    limit: number;
    remaining: number;
    windowMinutes: number;
    windowBeganAt: string;
    resetAt: string | null;
    allowed: boolean;
    explanation: string;
  } | null;
  plan: {
    plan: string;
    tier: string;
    subscribed: boolean;
    expiresAt: string | null;
    enabled: boolean;
    minute: KeyMeter;
    daily: KeyMeter;
  };
  policies: KeyPolicy[];
  remembered: NearLimit[];
}

export interface KeyMeter {
  limit: number;
  remaining: number;
  resetAfterMs: number;
}

export interface KeyPolicy extends KeyMeter {
  policy: string;
  shadow: boolean;
  allowed: boolean;
  retryAfterMs: number | null;
  explanation: string;
}

export interface Policy {
  name: string;
  kind: 'fixed_window' | 'sliding_window' | 'token_bucket' | 'concurrency';
  limit?: number;
  window?: string;
  capacity?: number;
  refill?: number;
  period?: string;
  ttl?: string;
  shadow: boolean;
  onOutage: string;
  match?: { domain: string; entries: Record<string, string> };
}

export interface Tier {
  tier: string;
  requestsPerMinute: number;
  burstCapacity: number;
  dailyLimit: number;
}

export interface Subscription {
  user: string;
  plan: string;
  tier: string;
  expiresAt: string | null;
}

export interface RequestSummary {
  requestId: string;
  status: string;
  failureCode: string | null;
  failureMessage: string | null;
  attempts: number;
  acceptedAt: string;
  updatedAt: string;
  tenantId: string;
  requestType: string;
  traceId: string | null;
}

export interface Job {
  downstream: string;
  state: string;
  dueAt: string;
  why: string;
}

export interface Unfinished extends RequestSummary {
  job: Job;
}

export interface RequestDetail extends RequestSummary {
  result: unknown;
  resultError?: string;
  callbackUrl: string | null;
  payload: string;
  job: Job | null;
}

export interface DeadLetter {
  id: string;
  topic: string;
  key: string;
  payload: string;
  truncated: boolean;
  reason: string;
  attempts: number;
  diedAt: string;
  tenantId?: string;
  requestType?: string;
  failureCode?: string | null;
}

export interface DeadLetterGroup {
  topic: string;
  error: string;
  requestType: string | null;
  count: number;
  oldest: string;
  newest: string;
  sample: DeadLetter;
}

export interface SlotConfig {
  configName: string;
  version: number;
  maxPerWindow: number;
  windowSize: string;
  active: boolean;
}

export interface SlotWindow {
  windowStart: string;
  slotCount: number;
  maxPerWindow: number;
  status: 'OPEN' | 'CLOSED';
}

export interface Slot {
  eventId: string;
  scheduledTime: string;
  requestedTime: string;
}

export interface Product {
  sku: string;
  productName: string;
  initialStock: number;
  currentStock: number | null;
  startTime: string;
  endTime: string;
  state: 'UPCOMING' | 'ACTIVE' | 'ENDED';
  endReason: string | null;
}
