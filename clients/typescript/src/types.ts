// The wire types that calls take and give, as in /openapi.json, and the codes of errors.

/** `code` of the server's error bodies. A newer server may have others. */
export type ServerCode =
  | 'INVALID_REQUEST' | 'VALIDATION_ERROR' | 'UNAUTHENTICATED' | 'UNAUTHORIZED' | 'UNAUTHORIZED_SCOPE' | 'FORBIDDEN'
  | 'NOT_FOUND' | 'METHOD_NOT_ALLOWED' | 'REQUEST_TIMEOUT' | 'IDEMPOTENCY_PAYLOAD_CONFLICT' | 'ALREADY_FINAL'
  | 'RESET_DISABLED' | 'HOLD_EXPIRED' | 'PERMIT_EXPIRED' | 'PAYLOAD_TOO_LARGE' | 'UNSUPPORTED_MEDIA_TYPE' | 'RATE_LIMITED'
  | 'DEPENDENCY_UNAVAILABLE' | 'SERVICE_UNAVAILABLE' | 'SLOTS_EXHAUSTED' | 'INTERNAL_ERROR';
/** Codes of this client: nothing was heard, what was heard is not Weir's, or a request did not end in time. */
export type ClientCode = 'NO_CONNECTION' | 'NO_ANSWER' | 'UNEXPECTED_ANSWER' | 'NOT_FINAL';
export type ErrorCode = ServerCode | ClientCode | (string & {});

export interface Quota { userId: string; rateLimit: number; timeWindow: number; currentCount: number; lastRefreshTime: string }
export interface QuotaConfig {
  userId: string;
  rateLimit: number;
  /** Minutes. */
  timeWindow: number;
  /** Changes the limits without a new window. */
  keepCount?: boolean;
}
export interface Sent { status: 'QUEUED'; messageId: string; userId: string; remaining: number; resetAt: string }

export interface SlotEvent { eventId: string; configName: string; requestedTime: string }
export interface Slot extends SlotEvent { windowStart: string; scheduledTime: string; status: 'NEW' | 'EXISTING' }
/** An event of a bulk call that has no slot; `line` counts the events of the call from 1. */
export interface SlotFailure { line: number; eventId?: string; code: ErrorCode; message: string }

export interface Check { policy: string; key: string; cost?: number }
export interface CheckOptions {
  /** Looks and spends nothing. */
  peek?: boolean;
  explain?: boolean;
}
export interface CheckedLimit {
  policy: string;
  key: string;
  allowed: boolean;
  limit: number;
  remaining: number;
  /** `null`: the cost is above the limit. */
  retryAfterMs: number | null;
  resetAfterMs: number;
  permitId?: string;
  explanation?: string;
}
export interface Decision { allowed: boolean; checks: CheckedLimit[] }
export type Hold =
  | { allowed: true; holdId: string; remaining: number; expiresAt: string; retryAfterMs: number }
  | { allowed: false; holdId: null; remaining: number; expiresAt: null; retryAfterMs: number | null };
export interface Settled { holdId: string; policy: string; key: string; held: number; cost: number; refunded: number; charged: number }
export interface Released { permitId: string; policy: string; key: string; cost: number }

export type FinalStatus = 'COMPLETED' | 'FAILED_PERMANENT' | 'FAILED_RETRY_EXHAUSTED' | 'CANCELLED';
export type RequestStatus = 'ACCEPTED' | 'PENDING_ENQUEUE' | 'IN_PROGRESS' | FinalStatus;
export interface Submission { requestType: string; payload: unknown; callbackUrl?: string }
export interface Accepted { requestId: string; status: RequestStatus; acceptedAt: string }
export interface RequestState<Status extends RequestStatus = RequestStatus> {
  requestId: string; status: Status; failureCode: string | null; failureMessage: string | null; attempts: number;
  acceptedAt: string; updatedAt: string; result: unknown; resultError?: string | null;
}

export interface Sale {
  sku: string; state: 'UPCOMING' | 'ACTIVE' | 'ENDED'; stock: number; initialStock: number; productName: string;
  startTime: string; endTime: string; endReason: string | null;
}
export interface Purchase { sku: string; purchaseNo: string; purchasedAt: string }
/** With `ALREADY_PURCHASED` comes the purchase that the buyer has, perhaps by an attempt whose answer was lost. */
export type PurchaseOutcome =
  | { outcome: 'PURCHASED' | 'ALREADY_PURCHASED'; purchase: Purchase }
  | { outcome: 'SOLD_OUT' | 'SALE_NOT_ACTIVE' | 'CHALLENGE_REQUIRED'; message: string };
export type SaleEvent =
  | { type: 'initial'; id: string; data: Pick<Sale, 'sku' | 'state' | 'stock' | 'startTime' | 'endTime' | 'endReason'> }
  | { type: 'stock-update'; id: string; data: { sku: string; stock: number } }
  | { type: 'state-change'; id: string; data: { sku: string; state: Sale['state']; reason?: string } };
