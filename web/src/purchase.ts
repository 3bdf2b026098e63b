// One shopper's purchase in one run of a sale: from the form to an outcome that is known for certain. An attempt that
// was not answered is never guessed about: the server is asked until it says whether there is a purchase.
import type { Answer, Api } from './api';
import { backoff, startJitter } from './backoff';
import type { Buyer } from './buyer';
import { Unproven } from './challenge';
import type { Challenge, ChallengeKind } from './challenge';
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
  /** The challenge could not be shown. */
  | { kind: 'unproven' }
  | { kind: 'signedOut' }
  | { kind: 'rejected'; message: string };

export interface PurchaseState {
  /** `challenged`: the server wants the shopper to show that it is a person. */
  step: 'ready' | 'sending' | 'challenged' | 'checking';
  userId: string;
  fieldError: string | null;
  outcome: Outcome | null;
}

export type Action =
  | { type: 'typed'; userId: string }
  | { type: 'invalid'; message: string }
  | { type: 'sent'; userId: string }
  | { type: 'challenged' }
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
    case 'challenged':
      return { ...state, step: 'challenged' };
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
    case 'UNAUTHORIZED':
      return { kind: 'signedOut' };
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
/** The server takes one attempt a second of a shopper. */
const ATTEMPT_GAP_MS = 1100;
/** Challenges that a shopper is asked to solve for one order. */
const CHALLENGES = 3;
/** How far the server's clock may be from what is known of it, and less than the second between two attempts. */
const CLOCK_SLACK_MS = 500;

export interface SessionOptions {
  api: Api;
  clock: ServerClock;
  memory: Memory;
  /** `null` where nobody has to show that they are a person. */
  challenge?: Challenge | null;
  /** Who buys, where tokens name buyers: nothing is typed. */
  buyer?: Buyer | null;
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
  /** Begins the challenge of a shopper who is about to buy. */
  prepare(): void;
  /** The shopper does not solve the challenge, or need not any more. */
  giveUp(): void;
  /** The remembered shopper is somebody else. */
  startOver(): void;
  stop(): void;
}

const sleepFor = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

export function startSession(options: SessionOptions): Session {
  const { api, clock, memory, sale, challenge = null, buyer = null, random = Math.random, sleep = sleepFor, wallClock = Date.now } = options;
  const run = runOf(sale);
  const state = createStore<PurchaseState>({ step: 'ready', userId: buyer?.userId ?? options.userId ?? '', fieldError: null, outcome: null });
  const dispatch = (action: Action) => state.set(reduce(state.get(), action));
  let attempts = 0;
  let stopped = false;
  let solving = new AbortController();

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
    const problem = buyer === null ? userIdProblem(input) : null;
    if (problem !== null) return dispatch({ type: 'invalid', message: problem });
    const userId = buyer?.userId ?? input.trim();
    const jitterMs = startJitter(clock.now() - sale.startTime, attempts, random);
    attempts += 1;
    dispatch({ type: 'sent', userId });
    if (jitterMs > 0) await sleep(jitterMs);
    if (stopped) return;
    solving = new AbortController();
    try {
      await order(userId);
    } catch (problem) {
      if (!(problem instanceof Unproven)) throw problem;
      remember(userId, null, null);
      dispatch({ type: 'settled', outcome: solving.signal.aborted ? null : { kind: 'unproven' } });
    }
  }

  /** Sends the order, again with a solved challenge while the server asks for one. */
  async function order(userId: string): Promise<void> {
    let kind: ChallengeKind = 'invisible';
    for (let asked = 0; ; asked += 1) {
      const proof = challenge === null ? null : await challenge.prove(kind, solving.signal, () => dispatch({ type: 'challenged' }));
      if (stopped) return;
      if (proof?.kind === 'interactive') dispatch({ type: 'sent', userId });
      const sentAt = wallClock();
      remember(userId, sentAt, null);
      const answer = await api.buy(sale.sku, userId, proof);
      const unproven = answer.kind === 'refused' && answer.error.code === 'CHALLENGE_REQUIRED';
      if (!unproven || challenge === null || asked === CHALLENGES) return follow(userId, sentAt, answer);
      remember(userId, null, null);
      dispatch({ type: 'challenged' });
      await sleep(Math.max(0, ATTEMPT_GAP_MS - (wallClock() - sentAt)));
      kind = 'interactive';
    }
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
    if (buyer !== null && record.userId !== buyer.userId) return;
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
    if (buyer !== null && record.userId !== buyer.userId) return;
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
    prepare: () => challenge?.prepare(),
    giveUp: () => solving.abort(),
    typed: (userId) => dispatch({ type: 'typed', userId }),
    stop() {
      stopped = true;
      solving.abort();
      unwatch();
    },
  };
}
