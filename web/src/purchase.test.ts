import { describe, expect, it, vi } from 'vitest';
import type { Answer, Api } from './api';
import type { Buyer } from './buyer';
import { Unproven } from './challenge';
import type { Challenge, ChallengeKind, Proof } from './challenge';
import { createServerClock } from './clock';
import type { Purchase } from './contract';
import type { Memory, Remembered } from './memory';
import { DECIDED_MS, judge, reduce, startSession } from './purchase';
import type { PurchaseState } from './purchase';

const bought: Purchase = { purchaseNo: 'PUR-20260215-0001', purchasedAt: '2026-02-15T10:00:01.234Z' };
const ok: Answer<Purchase> = { kind: 'ok', value: bought };
const none: Answer<Purchase> = { kind: 'refused', status: 404, error: { code: 'NOT_FOUND', message: '' }, retryAfterMs: 0 };
const gone: Answer<Purchase> = { kind: 'unreachable' };
const refused = (code: string, status = 200, retryAfterMs = 0): Answer<Purchase> => ({
  kind: 'refused', status, error: { code, message: `says ${code}` }, retryAfterMs,
});

function memoryOf(first: Remembered | null = null): Memory & { held: Remembered | null; poke(): void } {
  let listener = () => {};
  const memory = {
    held: first,
    load: () => memory.held,
    save: (record: Remembered) => void (memory.held = record),
    forget: () => void (memory.held = null),
    watch: (next: () => void) => ((listener = next), () => {}),
    poke: () => listener(),
  };
  return memory;
}

function setUp({ buys = [], finds = [], memory = memoryOf(), startTime = -60_000, challenge, buyer }: {
  buys?: Answer<Purchase>[]; finds?: Answer<Purchase>[]; memory?: ReturnType<typeof memoryOf>; startTime?: number;
  challenge?: Challenge; buyer?: Buyer;
}) {
  let time = 1_000_000;
  const sleeps: number[] = [];
  const api = {
    buy: vi.fn(async (_sku: string, _userId: string, _proof: Proof | null) => buys.shift() ?? gone),
    purchase: vi.fn(async () => finds.shift() ?? none),
  };
  const session = startSession({
    api: api as unknown as Api,
    clock: createServerClock(() => time, () => time),
    memory,
    challenge: challenge ?? null,
    buyer: buyer ?? null,
    sale: { sku: 'W-1', startTime, state: 'ACTIVE' },
    random: () => 0.5,
    sleep: async (ms) => { sleeps.push(ms); time += ms; },
    wallClock: () => time,
  });
  const settled = () => vi.waitFor(() => { if (session.state.get().step !== 'ready') throw new Error('busy'); });
  return { api, session, memory, sleeps, settled };
}

const record = (change: Partial<Remembered>): Remembered => ({
  sku: 'W-1', run: 'W-1@-60000', userId: 'ada', sentAt: null, purchase: null, ...change,
});

describe('an answer', () => {
  it.each([
    [ok, 'confirmed'],
    [refused('ALREADY_PURCHASED'), 'already'],
    [refused('SOLD_OUT'), 'soldOut'],
    [refused('SALE_NOT_ACTIVE'), 'notActive'],
    [refused('RATE_LIMITED', 429, 2000), 'throttled'],
    [refused('SERVICE_UNAVAILABLE', 503), 'unknown'],
    [gone, 'unknown'],
    [refused('NOT_FOUND', 404), 'rejected'],
  ])('%j means %s', (answer, kind) => expect(judge(answer, 0).kind).toBe(kind));

  it('that throttles says until when, and never "at once"', () => {
    expect(judge(refused('RATE_LIMITED', 429, 3000), 500)).toEqual({ kind: 'throttled', until: 3500 });
    expect(judge(refused('RATE_LIMITED', 429), 500)).toEqual({ kind: 'throttled', until: 1500 });
  });
});

describe('the form', () => {
  const state: PurchaseState = { step: 'sending', userId: 'ada', fieldError: null, outcome: null };
  it('does not change under an attempt that is on its way', () => {
    expect(reduce(state, { type: 'typed', userId: 'bob' })).toBe(state);
  });
  it('sends nothing while the input is wrong', async () => {
    const { session, api } = setUp({});
    session.typed('   ');
    await session.buy();
    expect(api.buy).not.toHaveBeenCalled();
    expect(session.state.get().fieldError).toMatch(/Enter/);
    session.typed('a');
    expect(session.state.get().fieldError).toBeNull();
  });
});

describe('a purchase', () => {
  it('is confirmed, remembered and not repeated', async () => {
    const { session, api, memory } = setUp({ buys: [ok] });
    session.typed(' ada ');
    await Promise.all([session.buy(), session.buy()]);
    await session.buy();
    expect(api.buy.mock.calls).toEqual([['W-1', 'ada', null]]);
    expect(session.state.get().outcome).toEqual({ kind: 'confirmed', purchase: bought, restored: false });
    expect(memory.held).toMatchObject({ userId: 'ada', sentAt: null, purchase: bought });
  });

  it('waits for its jitter when it falls into the opening, and only then', async () => {
    const rush = setUp({ buys: [refused('RATE_LIMITED', 429), ok], startTime: 999_500 });
    rush.session.typed('ada');
    await rush.session.buy();
    expect(rush.sleeps).toEqual([250]);
    await rush.session.buy();
    expect(rush.sleeps).toEqual([250]);
  });

  it('made before is shown with its number', async () => {
    const earlier = { ...bought, purchasedAt: new Date(998_900).toISOString() };
    const { session } = setUp({ buys: [refused('ALREADY_PURCHASED')], finds: [{ kind: 'ok', value: earlier }] });
    session.typed('ada');
    await session.buy();
    expect(session.state.get().outcome).toEqual({ kind: 'already', purchase: earlier });
  });

  it.each([
    ['ALREADY_PURCHASED', 200],
    ['RATE_LIMITED', 429],
    ['SOLD_OUT', 200],
    ['SALE_NOT_ACTIVE', 200],
  ])('that the browser sent twice by itself is confirmed, whatever became of the copy: %s', async (code, status) => {
    const own = { ...bought, purchasedAt: new Date(1_000_000).toISOString() };
    const { session } = setUp({ buys: [refused(code, status)], finds: [gone, { kind: 'ok', value: own }] });
    session.typed('ada');
    await session.buy();
    expect(session.state.get().outcome).toEqual({ kind: 'confirmed', purchase: own, restored: false });
  });

  it('whose answer was lost is found again', async () => {
    const { session } = setUp({ buys: [gone], finds: [gone, refused('SERVICE_UNAVAILABLE', 503), ok] });
    session.typed('ada');
    await session.buy();
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed', purchase: bought });
  });

  it('is called lost only once the server must have decided', async () => {
    const { session, api, sleeps } = setUp({ buys: [gone], finds: [none, none] });
    session.typed('ada');
    await session.buy();
    expect(api.purchase).toHaveBeenCalledTimes(2);
    expect(sleeps).toEqual([DECIDED_MS]);
    expect(session.state.get().outcome).toEqual({ kind: 'lost' });
  });

  it('refused with 503 is checked too, then told apart from a lost one', async () => {
    const { session } = setUp({ buys: [refused('SERVICE_UNAVAILABLE', 503, 4000)], finds: [none, none] });
    session.typed('ada');
    await session.buy();
    expect(session.state.get().outcome?.kind).toBe('unavailable');
  });
});

/** A challenge that gives a token for each kind in turn, or fails. */
function challengeOf(...given: (string | null)[]) {
  const prove = vi.fn(async (kind: ChallengeKind): Promise<Proof> => {
    const token = given.shift() ?? null;
    if (token === null) throw new Unproven('no token');
    return { token, kind };
  });
  return { place: () => {}, prepare: () => {}, prove };
}

describe('with a challenge', () => {
  it('the order carries the token of the invisible one', async () => {
    const challenge = challengeOf('a');
    const { session, api } = setUp({ buys: [ok], challenge });
    session.typed('ada');
    await session.buy();
    expect(api.buy.mock.calls).toEqual([['W-1', 'ada', { token: 'a', kind: 'invisible' }]]);
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed' });
  });

  it('an order that needs more is sent again with the interactive one, a second later', async () => {
    const challenge = challengeOf('a', 'b');
    const { session, api, sleeps, memory } = setUp({ buys: [refused('CHALLENGE_REQUIRED'), ok], challenge });
    const steps: string[] = [];
    session.state.subscribe(() => steps.push(session.state.get().step));
    session.typed('ada');
    await session.buy();
    expect(api.buy.mock.calls.map(([, , proof]) => proof?.kind)).toEqual(['invisible', 'interactive']);
    expect(steps).toEqual(expect.arrayContaining(['sending', 'challenged', 'sending', 'ready']));
    expect(sleeps).toEqual([1100]);
    expect(memory.held).toMatchObject({ purchase: bought });
  });

  it('is not asked for ever', async () => {
    const challenge = challengeOf('a', 'b', 'c', 'd', 'e');
    const { session, api } = setUp({ buys: Array(5).fill(refused('CHALLENGE_REQUIRED')), challenge });
    session.typed('ada');
    await session.buy();
    expect(api.buy).toHaveBeenCalledTimes(4);
    expect(session.state.get().outcome).toEqual({ kind: 'rejected', message: 'says CHALLENGE_REQUIRED' });
  });

  it('nothing is sent when the provider gives no token, and nothing is remembered as sent', async () => {
    const { session, api, memory } = setUp({ challenge: challengeOf(null) });
    session.typed('ada');
    await session.buy();
    expect(api.buy).not.toHaveBeenCalled();
    expect(session.state.get()).toMatchObject({ step: 'ready', outcome: { kind: 'unproven' } });
    expect(memory.held?.sentAt).toBeNull();
  });

  it('a shopper who gives up can order again', async () => {
    const prove = vi.fn((kind: ChallengeKind, signal: AbortSignal) => new Promise<Proof>((solved, failed) => {
      if (kind === 'invisible') return solved({ token: 'a', kind });
      const fail = () => failed(new Unproven('aborted'));
      if (signal.aborted) return fail();
      signal.addEventListener('abort', fail);
    }));
    const { session, settled } = setUp({ buys: [refused('CHALLENGE_REQUIRED'), ok], challenge: { place: () => {}, prepare: () => {}, prove } });
    session.typed('ada');
    const order = session.buy();
    await vi.waitFor(() => expect(session.state.get().step).toBe('challenged'));
    session.giveUp();
    await order;
    await settled();
    expect(session.state.get().outcome).toBeNull();
    await session.buy();
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed' });
  });
});

describe('a buyer who is named by a token', () => {
  const buyer = { token: 't', userId: 'ädä' };
  it('types nothing', async () => {
    const { session, api } = setUp({ buys: [ok], buyer });
    await session.buy();
    expect(api.buy.mock.calls).toEqual([['W-1', 'ädä', null]]);
  });
  it('is shown nothing of another who used this browser', () => {
    const { session } = setUp({ memory: memoryOf(record({ purchase: bought })), buyer });
    expect(session.state.get()).toMatchObject({ userId: 'ädä', outcome: null });
  });
  it('is told when the token is not good any more', async () => {
    const { session } = setUp({ buys: [refused('UNAUTHORIZED', 401)], buyer });
    await session.buy();
    expect(session.state.get().outcome).toEqual({ kind: 'signedOut' });
  });
});

describe('after a reload', () => {
  it('a purchase is shown at once and confirmed by the server', async () => {
    const { session, api } = setUp({ memory: memoryOf(record({ purchase: bought })), finds: [ok] });
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed', restored: true });
    await session.buy();
    expect(api.buy).not.toHaveBeenCalled();
  });

  it('a purchase that the server no longer knows is forgotten', async () => {
    const { session, memory } = setUp({ memory: memoryOf(record({ purchase: bought })), finds: [none] });
    await vi.waitFor(() => expect(session.state.get().outcome).toBeNull());
    expect(memory.held).toBeNull();
  });

  it('an attempt that was on its way is followed up', async () => {
    const { session, settled } = setUp({ memory: memoryOf(record({ sentAt: 999_900 })), finds: [none, ok] });
    expect(session.state.get().step).toBe('checking');
    await settled();
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed', purchase: bought });
  });

  it('of a sale that was reset only the name is left', () => {
    const { session } = setUp({ memory: memoryOf(record({ run: 'W-1@5', purchase: bought })) });
    expect(session.state.get()).toMatchObject({ userId: 'ada', outcome: null });
  });

  it('what another tab bought is taken over', () => {
    const memory = memoryOf();
    const { session } = setUp({ memory });
    memory.held = record({ purchase: bought });
    memory.poke();
    expect(session.state.get().outcome).toMatchObject({ kind: 'confirmed', purchase: bought });
  });
});
