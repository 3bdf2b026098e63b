// The client against a real server, and against one that loses, delays and refuses.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import type { TestContext } from 'node:test';
import { promisify } from 'node:util';
import { WebhookError, WeirClient, WeirError, verifyWebhook } from 'weir-client';
import type { Options, SaleEvent, SlotEvent } from 'weir-client';
import { ADMIN_KEY, StandIn, startServer } from './harness.js';
import type { Behaviour, Server } from './harness.js';

let server: Server;
let operator: WeirClient;
before(async () => {
  server = await startServer();
  operator = client();
  await operator.call('PUT', '/admin/policies/tokens', { body: { kind: 'token_bucket', capacity: 100, refill: 1, period: 'P1D' } });
  await operator.call('PUT', '/admin/policies/jobs', { body: { kind: 'concurrency', limit: 1, ttl: 'PT1M' } });
  await operator.call('POST', '/admin/rate-limit/config', { body: { configName: 'pay', maxPerWindow: 10, windowSize: 'PT4S' } });
});
after(() => server.stop());

const client = (options: Partial<Options> = {}) => new WeirClient({ url: server.url, adminKey: ADMIN_KEY, deadlineMs: 20_000, ...options });
const tenant = (options: Partial<Options> = {}) => new WeirClient({ url: server.url, token: server.token, deadlineMs: 20_000, ...options });

async function standInFor(t: TestContext, ...behaviours: Behaviour[]): Promise<StandIn> {
  const standIn = await StandIn.start(server.url, ...behaviours);
  t.after(() => standIn.stop());
  return standIn;
}

async function refused(call: Promise<unknown>, code: string): Promise<WeirError> {
  try {
    await call;
  } catch (error) {
    assert(error instanceof WeirError);
    assert.equal(error.code, code);
    return error;
  }
  assert.fail(`not refused with ${code}`);
}

const event = (eventId: string, configName = 'pay'): SlotEvent => ({ eventId, configName, requestedTime: '2026-06-01T12:00:00Z' });
async function someone(rateLimit: number): Promise<string> {
  const userId = randomUUID();
  await operator.quota.configure({ userId, rateLimit, timeWindow: 60 });
  return userId;
}

test('sends within a quota, and tells when the next is possible without waiting beyond the deadline', async () => {
  const user = await someone(1);
  assert.equal((await operator.quota.send(user, 'hello')).status, 'QUEUED');
  const began = performance.now();
  const error = await refused(operator.quota.send(user, 'again'), 'RATE_LIMITED');
  assert.equal(error.status, 429);
  assert(error.retryAfterMs !== null && error.retryAfterMs > 3_000_000);
  assert(error.requestId !== null && error.idempotencyKey !== undefined && !error.outcomeUnknown);
  assert(performance.now() - began < 10_000);
  assert.equal((await operator.quota.configure({ userId: user, rateLimit: 2, timeWindow: 60, keepCount: true })).rateLimit, 2);
  assert.equal((await operator.quota.get(user)).currentCount, 1);
  await operator.quota.remove(user);
  await refused(operator.quota.get(user), 'NOT_FOUND');
});

test('a key of the caller gives the same message, and refuses another', async () => {
  const user = await someone(5);
  const options = { idempotencyKey: randomUUID() };
  const first = await operator.quota.send(user, 'hello', options);
  assert.deepEqual(await operator.quota.send(user, 'hello', options), first);
  await refused(operator.quota.send(user, 'other', options), 'IDEMPOTENCY_PAYLOAD_CONFLICT');
});

for (const behaviour of ['lose', 'hang', 'cut'] as const) {
  test(`a send whose answer is lost (${behaviour}) is sent again under its key and counts once`, async (t) => {
    const user = await someone(5);
    const standIn = await standInFor(t, behaviour, behaviour);
    await client({ url: standIn.url, attemptMs: behaviour === 'hang' ? 1_000 : 5_000 }).quota.send(user, 'hello');
    assert.equal((await operator.quota.get(user)).currentCount, 1);
    const keys = standIn.seen.map(({ headers }) => headers['idempotency-key']);
    assert.equal(keys.length, 3);
    assert.equal(new Set(keys).size, 1);
    assert.equal(new Set(standIn.seen.map(({ body }) => body)).size, 1);
  });
}

test('each call has a key of its own', async (t) => {
  const user = await someone(5);
  const standIn = await standInFor(t);
  const weir = client({ url: standIn.url });
  await weir.quota.send(user, 'hello');
  await weir.quota.send(user, 'hello');
  assert.equal(new Set(standIn.seen.map(({ headers }) => headers['idempotency-key'])).size, 2);
  assert.equal((await operator.quota.get(user)).currentCount, 2);
});

for (const status of [429, 503]) {
  test(`waits at least as long as Retry-After of a ${status} says`, async (t) => {
    const user = await someone(5);
    const standIn = await standInFor(t, { status, headers: { 'Retry-After': '1' } });
    await client({ url: standIn.url }).quota.send(user, 'hello');
    assert.equal(standIn.seen.length, 2);
    const [first, second] = standIn.seen.map(({ at }) => at) as [number, number];
    assert(second - first >= 990, `${second - first}`);
  });
}

test('does not begin a wait that goes beyond the deadline, nor attempts after it', async (t) => {
  const standIn = await standInFor(t, { status: 503, headers: { 'Retry-After': '60' } }, ...new Array<Behaviour>(100).fill('hang'));
  const weir = client({ url: standIn.url, deadlineMs: 1_000, attemptMs: 300 });
  assert.equal((await refused(weir.quota.get('a'), 'UNEXPECTED_ANSWER')).retryAfterMs, 60_000);
  assert.equal(standIn.seen.length, 1);
  const began = performance.now();
  await refused(weir.quota.get('a'), 'NO_ANSWER');
  assert(performance.now() - began < 5_000);
  assert(standIn.seen.length >= 3, `${standIn.seen.length}`);
});

test('what nobody may repeat is sent once if its answer is lost, and again if it was refused', async (t) => {
  const key = randomUUID();
  const standIn = await standInFor(t, 'lose', { status: 503, headers: { 'Retry-After': '0' } }, 'lose', 'lose', { status: 429 });
  const weir = client({ url: standIn.url });
  const check = { policy: 'tokens', key, cost: 10 };
  assert((await refused(weir.limits.check(check), 'NO_ANSWER')).outcomeUnknown);
  assert((await refused(weir.limits.check(check), 'UNEXPECTED_ANSWER')).outcomeUnknown);
  await refused(weir.limits.hold(check), 'NO_ANSWER');
  await refused(weir.quota.configure({ userId: key, rateLimit: 1, timeWindow: 1 }), 'NO_ANSWER');
  assert.equal(standIn.seen.length, 4);
  const { checks } = await weir.limits.check(check);
  assert.equal(checks[0]?.remaining, 70);
  assert.equal(standIn.seen.length, 6);
});

test('a look and a settlement are repeated', async (t) => {
  const key = randomUUID();
  const hold = await operator.limits.hold({ policy: 'tokens', key, cost: 50 }, { ttl: 'PT1M' });
  assert(hold.allowed);
  const standIn = await standInFor(t, 'lose', 'lose');
  const weir = client({ url: standIn.url });
  assert.equal((await weir.limits.settle(hold.holdId, 20)).refunded, 30);
  assert.equal((await weir.limits.settle(hold.holdId, 20)).refunded, 30);
  standIn.seen.length = 0;
  const looked = await client({ url: (await standInFor(t, 'lose')).url }).limits.check({ policy: 'tokens', key }, { peek: true, explain: true });
  assert.equal(looked.checks[0]?.remaining, 80);
  assert.match(looked.checks[0]?.explanation ?? '', /tokens/);
  assert.equal((await operator.limits.hold({ policy: 'tokens', key, cost: 90 })).allowed, false);
  await refused(operator.limits.settle('no-such-hold', 1), 'NOT_FOUND');
});

test('a permit is released', async () => {
  const key = randomUUID();
  const first = await tenant().limits.check({ policy: 'jobs', key });
  const permitId = first.checks[0]?.permitId;
  assert(first.allowed && permitId !== undefined);
  assert.equal((await tenant().limits.check({ policy: 'jobs', key })).allowed, false);
  assert.equal((await tenant().limits.release(permitId)).permitId, permitId);
  assert.equal((await tenant().limits.check([{ policy: 'jobs', key }])).allowed, true);
});

test('credentials are given freshly before each attempt, and their absence is named', async (t) => {
  const standIn = await standInFor(t, { status: 503 });
  let asked = 0;
  const weir = tenant({ url: standIn.url, token: () => ((asked += 1), server.token) });
  await weir.limits.check({ policy: 'tokens', key: 'a' }, { peek: true });
  assert.equal(asked, 2);
  assert.equal((await refused(new WeirClient({ url: server.url }).limits.check({ policy: 'tokens', key: 'a' }), 'UNAUTHENTICATED')).status, 401);
  await assert.rejects(new WeirClient({ url: server.url, token: () => Promise.reject(new Error('no token')) }).requests.get('a'), /no token/);
});

test('a server that is not there is tried until the deadline', async () => {
  const gone = await StandIn.start(server.url);
  gone.stop();
  // `fetch` never connects to port 1.
  for (const url of [gone.url, 'http://127.0.0.1:1']) {
    const began = performance.now();
    const error = await refused(client({ url, deadlineMs: 500 }).limits.check({ policy: 'tokens', key: 'a' }), 'NO_CONNECTION');
    assert(!error.outcomeUnknown);
    assert(performance.now() - began < 5_000);
  }
});

test('a caller can leave', async (t) => {
  const standIn = await standInFor(t, 'hang');
  await assert.rejects(client({ url: standIn.url }).quota.get('a', { signal: AbortSignal.timeout(50) }), { name: 'TimeoutError' });
});

test('assigns slots, once per event', async (t) => {
  const standIn = await standInFor(t, 'lose');
  const id = randomUUID();
  const slot = await client({ url: standIn.url }).slots.assign(event(id));
  assert.equal(slot.status, 'EXISTING');
  assert.equal((await operator.slots.get(id)).scheduledTime, slot.scheduledTime);
  await operator.slots.remove(id);
  await refused(operator.slots.assign(event(id, 'unknown')), 'NOT_FOUND');
  for (const odd of ['bulk', 'windows', 'a/b ?%c']) {
    await operator.slots.assign(event(odd));
    assert.equal((await operator.slots.get(odd)).eventId, odd);
  }
});

test('answers of a bulk call come in the order of its events, over several uploads and lost answers', async (t) => {
  const standIn = await standInFor(t, 'lose', 'cut');
  const name = randomUUID();
  async function* events() {
    for (let number = 1; number <= 1_500; number += 1) yield event(`${name}-${number}`, number % 700 === 0 ? 'unknown' : 'pay');
  }
  let line = 0;
  for await (const answer of client({ url: standIn.url }).slots.bulk(events())) {
    line += 1;
    assert.equal(answer.eventId, `${name}-${line}`);
    if ('code' in answer) assert.deepEqual([answer.line % 700, answer.line, answer.code], [0, line, 'NOT_FOUND']);
    else assert.notEqual(line % 700, 0);
  }
  assert.equal(line, 1_500);
  assert.equal(standIn.seen.length, 4);
});

test('lines of a bulk call that could not be decided are uploaded again, alone', async (t) => {
  const name = randomUUID();
  const undecided = { line: 2, eventId: `${name}-2`, code: 'DEPENDENCY_UNAVAILABLE', message: 'later' };
  const slots = [1, 3].map((number) => ({ ...event(`${name}-${number}`), windowStart: '', scheduledTime: '', status: 'NEW' }));
  const body = [slots[0], undecided, slots[1]].map((line) => JSON.stringify(line)).join('\n');
  const fake = http.createServer((_, response) => response.end(body)).listen(0, '127.0.0.1');
  t.after(() => (fake.close(), fake.closeAllConnections()));
  await new Promise((done) => fake.once('listening', done));
  const bodies: string[] = [];
  const passing: typeof fetch = (url, init) => {
    bodies.push(String(init?.body));
    return fetch(bodies.length === 1 ? `http://127.0.0.1:${(fake.address() as AddressInfo).port}` : url, init);
  };
  const answers = [];
  for await (const answer of client({ fetch: passing }).slots.bulk([1, 2, 3].map((number) => event(`${name}-${number}`)))) answers.push(answer);
  assert.deepEqual(answers.map((answer) => answer.eventId), [`${name}-1`, `${name}-2`, `${name}-3`]);
  assert(!('code' in answers[1]!));
  assert.deepEqual(bodies.slice(1), [`${JSON.stringify(event(`${name}-2`))}\n`]);
});

test('a request is submitted once and waited for', async (t) => {
  const standIn = await standInFor(t, 'lose', 'lose', { status: 503 });
  const weir = tenant({ url: standIn.url });
  const done = await weir.requests.submitAndWait({ requestType: 'payment', payload: { amount: 12.5 } });
  assert.equal(done.status, 'COMPLETED');
  assert.deepEqual(done.result, { amount: 12.5 });
  const submissions = standIn.seen.filter(({ method }) => method === 'POST');
  assert.deepEqual(submissions.map(({ body }) => body), new Array(4).fill(submissions[0]?.body));
  await refused(weir.requests.cancel(done.requestId), 'ALREADY_FINAL');
  const idempotencyKey = String(JSON.parse(submissions[0]?.body ?? '').idempotencyKey);
  assert.equal((await weir.requests.submit({ requestType: 'payment', payload: { amount: 12.5 } }, { idempotencyKey })).requestId, done.requestId);
  const conflict = await refused(weir.requests.submit({ requestType: 'payment', payload: {} }, { idempotencyKey }), 'IDEMPOTENCY_PAYLOAD_CONFLICT');
  assert.equal(conflict.idempotencyKey, idempotencyKey);
});

test('waiting falls back to asking, and ends in time', async (t) => {
  const state = { requestId: 'r', status: 'IN_PROGRESS' };
  const standIn = await standInFor(t, { status: 503, body: { code: 'DEPENDENCY_UNAVAILABLE' } }, ...new Array<Behaviour>(50).fill({ status: 200, body: state }));
  const began = performance.now();
  const error = await refused(tenant({ url: standIn.url }).requests.wait('r', { waitMs: 700 }), 'NOT_FINAL');
  assert.match(error.message, /IN_PROGRESS/);
  assert(performance.now() - began >= 690);
  assert.match(standIn.seen[0]?.path ?? '', /\?wait=/);
  assert.equal(standIn.seen[1]?.path, '/v1/requests/r');
  assert(standIn.seen.length < 15, `${standIn.seen.length} calls in 0.7 s`);
});

test('a cancellation whose answer was lost has cancelled', async (t) => {
  const final = { status: 409, body: { code: 'ALREADY_FINAL', message: 'cancelled' } };
  const standIn = await standInFor(t, { status: 503 }, final, { status: 200, body: { status: 'CANCELLED' } });
  assert.equal((await tenant({ url: standIn.url }).requests.cancel('r')).status, 'CANCELLED');
});

async function sale(stock: number): Promise<string> {
  const sku = randomUUID();
  const start = Date.now() + 300;
  const times = { startTime: new Date(start).toISOString(), endTime: new Date(start + 600_000).toISOString() };
  await operator.call('POST', '/api/v1/products', { body: { sku, productName: 'Shoe', initialStock: stock, ...times } });
  for await (const { data } of operator.sales.events(sku)) if ('state' in data && data.state === 'ACTIVE') break;
  return sku;
}

test('a buyer gets one unit, also when the answer is lost', async (t) => {
  const sku = await sale(2);
  const standIn = await standInFor(t, 'lose');
  const first = await client({ url: standIn.url }).sales.attempt(sku, 'a');
  assert.equal(first.outcome, 'ALREADY_PURCHASED');
  assert('purchase' in first && first.purchase.purchaseNo.startsWith('PUR-'));
  assert.equal((await operator.sales.attempt(sku, 'b')).outcome, 'PURCHASED');
  assert.equal((await operator.sales.attempt(sku, 'c')).outcome, 'SOLD_OUT');
  assert.equal((await operator.sales.status(sku)).stock, 0);
  await refused(operator.sales.purchase(sku, 'c'), 'NOT_FOUND');
  await refused(operator.sales.attempt('', 'c'), 'VALIDATION_ERROR');
});

test('events of a sale are resumed where the stream broke off', async (t) => {
  const sku = await sale(3);
  const standIn = await standInFor(t);
  const seen: SaleEvent[] = [];
  for await (const event of client({ url: standIn.url }).sales.events(sku)) {
    seen.push(event);
    if (event.type === 'state-change') break;
    if (seen.length === 2) standIn.cut();
    await operator.sales.attempt(sku, `buyer ${seen.length}`);
  }
  assert.deepEqual(seen.map(({ type }) => type), ['initial', 'stock-update', 'stock-update', 'stock-update', 'state-change']);
  assert.deepEqual(seen.map(({ data }) => ('stock' in data ? data.stock : data.state)), [3, 2, 1, 0, 'ENDED']);
  assert.deepEqual(standIn.seen.map(({ headers }) => headers['last-event-id']), [undefined, seen[1]?.id]);
});

test('a silent stream is opened again, and one that is refused ends', async (t) => {
  const sku = await sale(1);
  const standIn = await standInFor(t, { status: 503 }, 'hang');
  for await (const { type } of client({ url: standIn.url, attemptMs: 1_000 }).sales.events(sku)) {
    assert.equal(type, 'initial');
    break;
  }
  assert.equal(standIn.seen.length, 3);
  await refused(operator.sales.events('no-such-sku').next(), 'NOT_FOUND');
  const silent = await standInFor(t);
  const leave = new AbortController();
  const stream = client({ url: silent.url }).sales.events(sku, { silenceMs: 200, signal: leave.signal });
  await stream.next();
  const next = stream.next();
  while (silent.seen.length < 3) await new Promise((done) => setTimeout(done, 20));
  leave.abort();
  await assert.rejects(next, { name: 'AbortError' });
});

test('webhooks of the server are verified, and nothing else', async (t) => {
  const received = new Promise<{ headers: http.IncomingHttpHeaders; body: string }>((done) => {
    const receiver = http.createServer(async (request, response) => {
      let body = '';
      for await (const part of request) body += String(part);
      response.end();
      done({ headers: request.headers, body });
    });
    receiver.listen(0, '127.0.0.1', async () => {
      const callbackUrl = `http://127.0.0.1:${(receiver.address() as AddressInfo).port}/`;
      await tenant().requests.submit({ requestType: 'payment', payload: 'ü', callbackUrl });
    });
    t.after(() => (receiver.close(), receiver.closeAllConnections()));
  });
  const { headers, body } = await received;
  const { secret } = await tenant().call<{ secret: string }>('GET', '/v1/webhook-secret');
  const webhook = await verifyWebhook<{ type: string; data: { result: string } }>(secret, headers, body);
  assert.equal(webhook.payload.type, 'request.completed');
  assert.equal(webhook.payload.data.result, 'ü');
  const other = 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw';
  assert.equal((await verifyWebhook(`${other} ${secret}`, headers, new TextEncoder().encode(body))).id, headers['webhook-id']);
  await assert.rejects(verifyWebhook(other, headers, body), WebhookError);
  await assert.rejects(verifyWebhook(secret, headers, body.replace('ü', 'u')), WebhookError);
  await assert.rejects(verifyWebhook(secret, { ...headers, 'webhook-id': 'another' }, body), WebhookError);
  await assert.rejects(verifyWebhook(secret, { ...headers, 'webhook-signature': 'v1,AAAA v2,x v1,%' }, body), WebhookError);
  await assert.rejects(verifyWebhook(secret, { ...headers, 'webhook-signature': undefined }, body), WebhookError);
  for (const minutes of [-6, 6]) {
    const now = new Date(Date.now() + minutes * 60_000);
    await assert.rejects(verifyWebhook(secret, headers, body, { now }), WebhookError);
  }
  await assert.rejects(verifyWebhook('whsec_', headers, body), TypeError);
});

test('the lines of README.md print what they say', async () => {
  const expected = [...readFileSync(join(import.meta.dirname, '../README.md'), 'utf8').matchAll(/console\.log\(.*\); *\/\/ (.*)$/gm)].map(([, output]) => output);
  const env = { ...process.env, WEIR_URL: server.url, WEIR_ADMIN_KEY: ADMIN_KEY, WEIR_TOKEN: server.token };
  const { stdout } = await promisify(execFile)(process.execPath, [join(import.meta.dirname, 'readme.js')], { env });
  assert.deepEqual(stdout.trim().split('\n'), expected);
  assert(expected.length > 8);
});
