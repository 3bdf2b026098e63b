// One shopper's purchase in one run of a sale: from the form to an outcome that is known for certain. An attempt that
// was not answered is never guessed about: the server is asked until it says whether there is a purchase.
import type { Answer, Api } from './api';
import { backoff, startJitter } from './backoff';
import type { ServerClock } from './clock';
import type { Purchase, Sale } from './contract';
import type { Memory } from './memory';
import { runOf } from './sale';
import { createStore } from './store';
import type { Store } from './store';
import { userIdProblem } from './validation';

export type Outcome =
  | { kind: 'confirmed'; purchase: Purchase; restored: boolean }
  | { kind: 'already'; purchase: Purchase | null }
  | { kind: 'soldOut' }
  | { kind: 'notActive' }
  /** `until` is on the local monotonic clock. */
  | { kind: 'throttled'; until: number }
  | { kind: 'unavailable'; until: number }
  | { kind: 'lost' }
  | { kind: 'rejected'; message: string };

export interface PurchaseState {
  step: 'ready' | 'sending' | 'checking';
  userId: string;
  fieldError: string | null;
  outcome: Outcome | null;
}

export type Action =
  | { type: 'typed'; userId: string }
  | { type: 'invalid'; message: string }
  | { type: 'sent'; userId: string }
  | { type: 'unanswered' }
  | { type: 'settled'; outcome: Outcome | null };

export function reduce(state: PurchaseState, action: Action): PurchaseState {
  switch (action.type) {
    case 'typed':
      return state.step === 'ready' ? { ...state, userId: action.userId, fieldError: null } : state;
    case 'invalid':
      return { ...state, fieldError: action.message, outcome: null };
    case 'sent':
      return { step: 'sending', userId: action.userId, fieldError: null, outcome: null };
    case 'unanswered':
      return { ...state, step: 'checking' };
    case 'settled':
      return { ...state, step: 'ready', outcome: action.outcome };
  }
}

/** Whether the shopper holds a unit: no further attempt is offered. */
export function holdsUnit(state: PurchaseState): boolean {
  return state.outcome?.kind === 'confirmed' || state.outcome?.kind === 'already';
}

/** `unknown` where the server may or may not have sold: no answer, or one that says that something broke. */
export function judge(answer: Answer<Purchase>, now: number): Outcome | { kind: 'unknown' } | { kind: 'invalid'; message: string } {
  if (answer.kind === 'ok') return { kind: 'confirmed', purchase: answer.value, restored: false };
  if (answer.kind === 'unreachable' || answer.status >= 500) return { kind: 'unknown' };
  const { code, message, fields } = answer.error;
  switch (code) {
    case 'ALREADY_PURCHASED':
      return { kind: 'already', purchase: null };
    case 'SOLD_OUT':
      return { kind: 'soldOut' };
    case 'SALE_NOT_ACTIVE':
      return { kind: 'notActive' };
    case 'RATE_LIMITED':
      return { kind: 'throttled', until: now + Math.max(answer.retryAfterMs, 1000) };
    case 'VALIDATION_ERROR':
      if (fields?.['X-User-Id']) return { kind: 'invalid', message: fields['X-User-Id'] };
  }
  return { kind: 'rejected', message };
}

/** The server answers or gives up within 2 s, so "no purchase" is final once an attempt is older than this. */
export const DECIDED_MS = 2500;
const CHECK = { baseMs: 500, maxMs: 5000 };
const LOOK_UPS = 6;
const LATE_LOOK_MS = 3000;
/** How far the server's clock may be from what is known of it, and less than the second between two attempts. */
const CLOCK_SLACK_MS = 500;

export interface SessionOptions {
  api: Api;
  clock: ServerClock;
  memory: Memory;
  sale: Pick<Sale, 'sku' | 'startTime' | 'state'>;
  /** What was typed before the sale's times were changed. */
  userId?: string;
  random?: () => number;
  sleep?: (ms: number) => Promise<void>;
  /** Device time, which survives a reload. */
  wallClock?: () => number;
}

export interface Session {
  state: Store<PurchaseState>;
  typed(userId: string): void;
  buy(): Promise<void>;
  /** The remembered shopper is somebody else. */
  startOver(): void;
  stop(): void;
}

const sleepFor = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

export function startSession(options: SessionOptions): Session {
  const { api, clock, memory, sale, random = Math.random, sleep = sleepFor, wallClock = Date.now } = options;
  const run = runOf(sale);
  const state = createStore<PurchaseState>({ step: 'ready', userId: options.userId ?? '', fieldError: null, outcome: null });
  const dispatch = (action: Action) => state.set(reduce(state.get(), action));
  let attempts = 0;
  let stopped = false;

  function remember(userId: string, sentAt: number | null, purchase: Purchase | null): void {
    memory.save({ sku: sale.sku, run, userId, sentAt, purchase });
  }

  function settle(userId: string, outcome: Outcome): void {
    const held = outcome.kind === 'confirmed' || outcome.kind === 'already' ? outcome.purchase : null;
    remember(userId, null, held);
    dispatch({ type: 'settled', outcome });
  }

  async function buy(): Promise<void> {
    const { step, userId: input } = state.get();
    if (step !== 'ready' || holdsUnit(state.get())) return;
    const problem = userIdProblem(input);
    if (problem !== null) return dispatch({ type: 'invalid', message: problem });
    const userId = input.trim();
    const jitterMs = startJitter(clock.now() - sale.startTime, attempts, random);
    attempts += 1;
    dispatch({ type: 'sent', userId });
    if (jitterMs > 0) await sleep(jitterMs);
    if (stopped) return;
    const sentAt = wallClock();
    remember(userId, sentAt, null);
    await follow(userId, sentAt, await api.buy(sale.sku, userId));
  }

  async function follow(userId: string, sentAt: number, answer: Answer<Purchase>): Promise<void> {
    if (stopped) return;
    const verdict = judge(answer, clock.local());
    if (verdict.kind === 'unknown') return check(userId, sentAt, answer);
    if (verdict.kind === 'invalid') {
      remember(userId, null, null);
      dispatch({ type: 'settled', outcome: null });
      return dispatch({ type: 'invalid', message: verdict.message });
    }
    if (verdict.kind === 'confirmed') return settle(userId, verdict);
    await settleDenied(userId, sentAt, verdict);
  }

  /**
   * Browsers send an order again by themselves when a kept-alive connection breaks under it. The second copy is denied
   * (a duplicate, too soon, sold out by the first copy), so after a denial the server is asked whether there is a
   * purchase. Those who were simply too late are many at once: they see it first, and ask over the next seconds.
   */
  async function settleDenied(userId: string, sentAt: number, outcome: Outcome): Promise<void> {
    if (outcome.kind === 'already' || outcome.kind === 'throttled') return settle(userId, (await held(userId, sentAt)) ?? outcome);
    settle(userId, outcome);
    if (outcome.kind !== 'soldOut' && outcome.kind !== 'notActive') return;
    await sleep(random() * LATE_LOOK_MS);
    const found = await held(userId, sentAt);
    if (found !== null && !stopped && state.get().outcome === outcome) settle(userId, found);
  }

  /** The shopper's purchase, if there is one; it is this attempt's own unless it is older. */
  async function held(userId: string, sentAt: number): Promise<Outcome | null> {
    let found = await api.purchase(sale.sku, userId);
    for (let attempt = 0; found.kind === 'unreachable' && attempt < LOOK_UPS && !stopped; attempt += 1) {
      await sleep(backoff(attempt, CHECK, random, 300));
      found = await api.purchase(sale.sku, userId);
    }
    if (found.kind !== 'ok') return null;
    const age = clock.now() - Date.parse(found.value.purchasedAt);
    const own = age <= wallClock() - sentAt + CLOCK_SLACK_MS;
    return own ? { kind: 'confirmed', purchase: found.value, restored: false } : { kind: 'already', purchase: found.value };
  }

  /** Asks until it is certain. `answer` is what the attempt itself brought, `null` after a reload. */
  async function check(userId: string, sentAt: number, answer: Answer<Purchase> | null): Promise<void> {
    dispatch({ type: 'unanswered' });
    for (let attempt = 0; !stopped; attempt += 1) {
      const found = await api.purchase(sale.sku, userId);
      if (stopped) return;
      if (found.kind === 'ok') return settle(userId, { kind: 'confirmed', purchase: found.value, restored: false });
      const age = Math.max(0, wallClock() - sentAt);
      const none = found.kind === 'refused' && found.status === 404;
      if (none && age >= DECIDED_MS) return settle(userId, failureOf(answer));
      await sleep(none ? DECIDED_MS - age : backoff(attempt, CHECK, random, 300));
    }
  }

  function failureOf(answer: Answer<Purchase> | null): Outcome {
    if (answer?.kind !== 'refused') return { kind: 'lost' };
    return { kind: 'unavailable', until: clock.local() + Math.max(0, answer.retryAfterMs - DECIDED_MS) };
  }

  /** Asks once, without getting in the shopper's way, whether the remembered shopper has bought. */
  async function lookUp(userId: string, shown: boolean): Promise<void> {
    const found = await api.purchase(sale.sku, userId);
    const untouched = attempts === 0 && state.get().userId === userId;
    if (stopped || !untouched) return;
    if (found.kind === 'ok') settle(userId, { kind: 'confirmed', purchase: found.value, restored: true });
    else if (shown && found.kind === 'refused' && found.status === 404) startOver();
  }

  function restore(): void {
    const record = memory.load(sale.sku);
    if (record === null) return;
    dispatch({ type: 'typed', userId: record.userId });
    if (record.run !== run) return;
    if (record.purchase !== null) {
      dispatch({ type: 'settled', outcome: { kind: 'confirmed', purchase: record.purchase, restored: true } });
      void lookUp(record.userId, true);
    } else if (record.sentAt !== null) {
      attempts = 1;
      void check(record.userId, record.sentAt, null);
    } else if (sale.state !== 'UPCOMING') void lookUp(record.userId, false);
  }

  function adopt(): void {
    const record = memory.load(sale.sku);
    if (state.get().step !== 'ready' || holdsUnit(state.get()) || record?.run !== run || record.purchase === null) return;
    dispatch({ type: 'typed', userId: record.userId });
    dispatch({ type: 'settled', outcome: { kind: 'confirmed', purchase: record.purchase, restored: true } });
  }

  function startOver(): void {
    memory.forget(sale.sku);
    dispatch({ type: 'settled', outcome: null });
    dispatch({ type: 'typed', userId: '' });
  }

  const unwatch = memory.watch(adopt);
  restore();

  return {
    state,
    buy,
    startOver,
    typed: (userId) => dispatch({ type: 'typed', userId }),
    stop() {
      stopped = true;
      unwatch();
    },
  };
}
