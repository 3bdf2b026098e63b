// What screens work out of the server's answers.
import { describe, expect, it } from 'vitest';
import type { DeadLetterGroup, KeyState, NearLimit, Product, RequestDetail } from './api';
import { initial } from './live';
import type { Snapshot } from './live';
import { lines } from './screens/Audit';
import type { Books } from './screens/Audit';
import { filterOf } from './screens/DeadLetters';
import { denials, lastWords } from './screens/Key';
import { alarms, columns } from './screens/Now';
import { deniedBy, policyWords } from './screens/Policies';
import { timeline } from './screens/Requests';
import { stockCurve } from './screens/Sale';
import { cellsOf, heat } from './screens/Slots';

const near = (used: number, limit: number, more: Partial<NearLimit> = {}): NearLimit => ({ capability: 'tier', limitName: 'login', key: `k${used}`, limit, remaining: limit - used, at: '', until: null, denials: 0, lastDenial: null, ...more });

const key: KeyState = {
  key: 'alice',
  quota: { limit: 5, remaining: 0, windowMinutes: 1, windowBeganAt: '2026-01-01T00:00:00Z', resetAt: '2026-01-01T00:01:00Z', allowed: false, explanation: 'Denied.' },
  plan: { plan: 'FREE', tier: 'free', subscribed: false, expiresAt: null, enabled: true, minute: { limit: 8, remaining: 8, resetAfterMs: 0 }, daily: { limit: 50, remaining: 0, resetAfterMs: 1000 } },
  policies: [
    { policy: 'login', shadow: false, allowed: false, limit: 5, remaining: 0, retryAfterMs: 500, resetAfterMs: 900, explanation: 'No room.' },
    { policy: 'watch', shadow: true, allowed: true, limit: 5, remaining: 0, retryAfterMs: 500, resetAfterMs: 900, explanation: 'Observes.' },
  ],
  remembered: [],
};

describe('why a key is denied', () => {
  it('names every limit that denies, and none that only observes', () => {
    expect(denials(key, 1000).map((one) => [one.limit, one.until])).toEqual([
      ['quota', Date.parse('2026-01-01T00:01:00Z')],
      ['login', 1500],
      ['daily', null],
    ]);
    expect(denials({ ...key, plan: { ...key.plan, enabled: false } }, 0).map((one) => one.limit)).toEqual(['quota', 'login']);
  });

  it('says how the limit stood then', () => {
    const denial = { at: '2026-01-01T00:00:00Z', limit: 5, remaining: 0, until: null };
    expect(lastWords(near(5, 5, { denials: 2, lastDenial: denial }))).toBe('policy login decided, all 5 were used; the cost is above the limit and never fits. 2 denials by it so far.');
    expect(lastWords(near(3, 5, { lastDenial: { ...denial, remaining: 2 } }))).toContain('2 of 5 were left, too few');
  });
});

it('a preview counts those who have used as much as the new limit allows', () => {
  const keys = [near(10, 10), near(7, 10), near(5, 10)];
  expect([deniedBy(keys, 10), deniedBy(keys, 6), deniedBy(keys, 20)].map((one) => [one.now.length, one.then.length])).toEqual([[1, 1], [1, 2], [1, 0]]);
});

it('policies are told in words', () => {
  const common = { name: 'p', shadow: false, onOutage: 'local' };
  expect(policyWords({ ...common, kind: 'sliding_window', limit: 1000, window: 'PT1M' })).toBe('1,000 in any 1 min');
  expect(policyWords({ ...common, kind: 'token_bucket', capacity: 5, refill: 2, period: 'PT1S' })).toBe('5 at once, 2 more every 1 s');
});

describe('a timeline', () => {
  const request: RequestDetail = { requestId: 'r', status: 'IN_PROGRESS', failureCode: 'DOWNSTREAM_TIMEOUT', failureMessage: 'no answer', attempts: 2, acceptedAt: 'a', updatedAt: 'u', tenantId: 't', requestType: 'pay', traceId: null, result: null, callbackUrl: null, payload: '', job: { downstream: '', state: 'retrying', dueAt: 'd', why: 'because' } };
  it('of a request that is tried again ends with what it waits for', () => {
    expect(timeline(request).map((step) => step.words)).toEqual(['Accepted', 'Attempts 1 to 2 failed', 'Now: retrying']);
  });
  it('of one that ended says with which attempt', () => {
    const done = { ...request, status: 'COMPLETED', failureCode: null, failureMessage: null, job: null };
    expect(timeline(done).map((step) => step.words)).toEqual(['Accepted', 'Attempt 1 did not succeed', 'Completed with attempt 2']);
    expect(timeline({ ...done, attempts: 1 }).map((step) => step.words)).toEqual(['Accepted', 'Completed with attempt 1']);
    const dead = { ...request, status: 'FAILED_RETRY_EXHAUSTED', attempts: 5, job: null };
    expect(timeline(dead).map((step) => step.words)).toEqual(['Accepted', 'Attempts 1 to 5 failed', 'Given up: a dead letter, unless it was discarded']);
  });
});

it('a group of dead letters is replayed by what all of it share', () => {
  const group = { topic: 'sms-outbound', error: 'missing field `…` at line … column …', requestType: null } as DeadLetterGroup;
  expect(filterOf(group)).toEqual({ topic: 'sms-outbound', error: 'missing field `' });
  expect(filterOf({ ...group, topic: 'requests', error: 'DOWNSTREAM_TIMEOUT', requestType: 'pay' })).toEqual({ topic: 'requests', type: 'pay', error: 'DOWNSTREAM_TIMEOUT' });
});

it('windows fall into their cells, and what is not there is empty', () => {
  const windows = [0, 4, 5].map((at) => ({ windowStart: new Date(at * 1000).toISOString(), slotCount: 10, maxPerWindow: 10, status: 'CLOSED' as const }));
  const cells = cellsOf(windows, 0, 1000, 4, 2, 10);
  expect(cells.map((cell) => [cell.start, cell.windows, cell.taken, cell.room])).toEqual([[0, 1, 10, 40], [4000, 2, 20, 40]]);
  expect(cells.map(heat)).toEqual([2, 3]);
  expect([heat({ taken: 0, room: 10 }), heat({ taken: 10, room: 10 }), heat({ taken: 9, room: 10 })]).toEqual([0, 6, 5]);
});

it('the stock falls from the initial stock by each purchase', () => {
  const product: Product = { sku: 's', productName: 'S', initialStock: 10, currentStock: 7, startTime: '2026-01-01T00:00:00Z', endTime: '2026-01-01T00:10:00Z', state: 'ENDED', endReason: null };
  const at = (second: number) => ({ purchaseNo: '', userId: '', purchasedAt: new Date(Date.parse(product.startTime) + second * 1000).toISOString() });
  const { x, left } = stockCurve(product, [at(10), at(300), at(20)], Date.now());
  expect(left[0]).toBe(10);
  expect(left.at(-1)).toBe(7);
  expect(left).toEqual([...left].sort((one, other) => other - one));
  expect(x).toEqual([...x].sort((one, other) => one - other));
});

it('steps that are missing are gaps', () => {
  const ring = { steps: [1, 2, 9], series: { a: [1, 2, 3], b: [1, 1, 1] } };
  expect(columns(ring, ['a', 'b'], 100, 1)).toEqual({ x: [101, 102, 103, 109], values: [2, 3, null, 4] });
});

it('the worst comes first among what needs attention', () => {
  const snapshot: Snapshot = {
    at: '', second: 9, series: {}, connections: 0, streams: 0, nearLimits: [],
    engines: [{ name: 'postgresql', up: false, latencyMs: 1000, reason: null, since: '2026-01-01T00:00:00Z' }],
    capabilities: [{ name: 'quota', ready: false, reason: 'postgresql does not answer' }],
    backlog: { downstreams: [{ name: 'bank', waiting: 3, running: 0, parked: 4, oldestWaitingSeconds: 60, breaker: 'open' }, { name: '', waiting: 2, running: 0, parked: 0, oldestWaitingSeconds: 61, breaker: 'closed' }], oldestPendingSeconds: 0, deadRequests: 1, deadLetters: { 'sms-outbound': 2 } },
  };
  const found = alarms({ ...initial, snapshot }, Date.parse('2026-01-01T00:01:00Z'));
  expect(found.map((one) => one.words)).toEqual([
    'postgresql has been down for 1 min',
    'quota cannot be served: postgresql does not answer',
    'The breaker of bank is open: 7 requests wait',
    '2 requests wait for the default downstream, the first for 1 min 1 s',
    '3 dead letters wait for a decision',
  ]);
  expect(alarms(initial, 0)).toEqual([]);
});

it('books that do not balance say by how much', () => {
  const messages = { accepted: 3, done: 1, discarded: 0, dead: 0, inFlight: 1, difference: 1 };
  const books: Books = {
    ok: false,
    quota: { ...messages, users: 1, overLimit: ['bob'] },
    slot: { slots: 4, counted: 5, different: ['default 12:00'], aboveMaximum: 0, dispatched: null },
    request: { accepted: 1, completed: 1, failed: 0, dead: 0, cancelled: 0, inFlight: 0, purged: 0, erased: 0, jobs: 0, difference: 0, webhooks: { ...messages, difference: 0 } },
    tier: { holds: 2, open: 1, held: 5, settled: 1, expired: 0, keys: 0, unsaved: 0 },
    sale: { products: 0, sold: 0, persisted: 0, different: [] },
    ofRows: false, recount: null, recounting: null,
  };
  const faults = lines(books).map((line) => line.faults);
  expect(faults).toEqual([['differs by 1', 'bob is over the limit'], ['differ by 1', 'default 12:00'], [], [], [], [], []]);
});
