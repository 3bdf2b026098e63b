// A server full of realistic data, for the tests of the console and its pictures: a real `weir serve`, a downstream that answers,
// fails, hangs or promises to call back by the type of request, and callers of every capability.
import { spawn } from 'node:child_process';
import { createHmac, randomBytes } from 'node:crypto';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const ADMIN_KEY = 'the-admin-key-of-these-tests';
const JWT_SECRET = 'the secret of these tests has 32 bytes and more';

/** @typedef {{ method?: string, body?: unknown, headers?: Record<string, string> }} Options */

/** Starts a server on an empty data directory. @param {string} binary @param {Record<string, string>} [settings] */
export async function startWorld(binary, settings = {}) {
  const folder = mkdtempSync(join(tmpdir(), 'weir-console-'));
  const downstream = await startDownstream();
  const env = {
    ...process.env,
    WEIR_ADMIN_KEY: ADMIN_KEY,
    WEIR_JWT_SECRET: JWT_SECRET,
    WEIR_DATA: folder,
    WEIR_GRPC_LISTEN: '127.0.0.1:0',
    WEIR_DOWNSTREAM: downstream.url,
    WEIR_SALE_USER_PER_SECOND: '0',
    ...settings,
  };
  /** @type {import('node:child_process').ChildProcess} */
  let child;
  let url = '';

  /** @param {number} port */
  async function start(port) {
    child = spawn(resolve(binary), ['serve'], { cwd: folder, env: { ...env, WEIR_LISTEN: `127.0.0.1:${port}` }, stdio: ['ignore', 'pipe', 'ignore'] });
    url = await new Promise((found, failed) => {
      let output = '';
      child.stdout?.on('data', (data) => {
        output = (output + String(data)).slice(-65_536);
        const ready = /http:\/\/127\.0\.0\.1:\d+/.exec(output);
        if (ready) found(ready[0]);
      });
      child.once('exit', (code) => failed(new Error(`the server ended with ${code}: ${output}`)));
    });
  }

  const kill = () =>
    /** @type {Promise<void>} */ (
      new Promise((done) => {
        child.once('exit', () => done());
        child.kill('SIGKILL');
      })
    );

  await start(0);
  const world = {
    adminKey: ADMIN_KEY,
    get url() {
      return url;
    },
    /** A call with the operator's key. @param {string} path @param {Options} [options] */
    async call(path, { method = 'GET', body, headers = {} } = {}) {
      const response = await fetch(`${url}${path}`, {
        method,
        headers: { 'x-admin-key': ADMIN_KEY, ...(body === undefined ? {} : { 'content-type': 'application/json' }), ...headers },
        ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      });
      const text = await response.text();
      return { status: response.status, body: text === '' ? null : JSON.parse(text) };
    },
    /** @param {Record<string, unknown>} claims */
    token(claims) {
      const part = (/** @type {unknown} */ value) => Buffer.from(JSON.stringify(value)).toString('base64url');
      const signed = `${part({ alg: 'HS256', typ: 'JWT' })}.${part({ sub: 'operator', exp: 4_000_000_000, ...claims })}`;
      return `${signed}.${createHmac('sha256', JWT_SECRET).update(signed).digest('base64url')}`;
    },
    kill,
    restart: () => start(Number(new URL(url).port)),
    async stop() {
      await kill();
      downstream.close();
      rmSync(folder, { recursive: true, force: true });
    },
  };
  return world;
}

/** @typedef {Awaited<ReturnType<typeof startWorld>>} World */

/** Answers by the type of the request: see `TYPES`. */
async function startDownstream() {
  const server = createServer((request, response) => {
    let text = '';
    request.on('data', (data) => (text += String(data)));
    request.on('end', () => {
      const type = /** @type {{ requestType?: string }} */ (JSON.parse(text || '{}')).requestType ?? '';
      const status = { kyc: 503, export: 202, legacy: 400 }[type] ?? 200;
      if (type === 'report') return; // Never answered.
      response.writeHead(status, { 'content-type': 'application/json' });
      response.end(status === 200 ? JSON.stringify({ booked: true, reference: randomBytes(4).toString('hex') }) : '{}');
    });
  });
  await new Promise((ready) => server.listen(0, '127.0.0.1', () => ready(undefined)));
  const address = server.address();
  return {
    url: `http://127.0.0.1:${typeof address === 'object' ? address?.port : ''}/`,
    close() {
      server.closeAllConnections();
      server.close();
    },
  };
}

/** Submits a request for a tenant, and gives its id. @param {World} world @param {string} tenant @param {string} type @param {string} key */
export async function submit(world, tenant, type, key) {
  const authorization = `Bearer ${world.token({ sub: 'shop', tenant_id: tenant, scope: 'requests:create requests:read' })}`;
  const { body } = await world.call('/v1/requests', {
    method: 'POST',
    body: { idempotencyKey: key, requestType: type, payload: { amount: 1250, currency: 'EUR', customer: `${tenant}-customer-17` } },
    headers: { authorization },
  });
  return /** @type {string} */ (body.requestId);
}

/** @param {World} world @param {string} userId @param {number} rateLimit @param {number} sends */
export async function user(world, userId, rateLimit, sends, timeWindow = 60) {
  await world.call('/api/config', { method: 'POST', body: { userId, rateLimit, timeWindow } });
  for (let n = 0; n < sends; n += 1) await world.call('/api/send', { method: 'POST', body: { userId, message: 'Your code is 4711' } });
}

/** Fills every screen. The dead letters come some seconds later. @param {World} world */
export async function fill(world) {
  await Promise.all([limits(world), slots(world), requests(world), sales(world)]);
}

/** @param {World} world */
async function limits(world) {
  const policies = {
    'login-per-address': { kind: 'sliding_window', limit: 20, window: 'PT5M' },
    'api-per-key': { kind: 'token_bucket', capacity: 200, refill: 50, period: 'PT1M' },
    'search-per-shop': { kind: 'fixed_window', limit: 60, window: 'PT10M', shadow: true },
    'exports-at-once': { kind: 'concurrency', limit: 3, ttl: 'PT5M' },
    'password-reset': { kind: 'fixed_window', limit: 3, window: 'PT1H', onOutage: 'closed' },
  };
  for (const [name, body] of Object.entries(policies)) await world.call(`/admin/policies/${name}`, { method: 'PUT', body });
  /** @type {[string, string, number][]} */
  const spent = [
    ['login-per-address', '203.0.113.7', 26],
    ['login-per-address', '198.51.100.23', 17],
    ['login-per-address', '192.0.2.41', 11],
    ['api-per-key', 'key_live_9f2c', 183],
    ['api-per-key', 'key_live_41bd', 122],
    ['search-per-shop', 'shop-berlin', 75],
    ['password-reset', 'mallory@example.com', 5],
    ['exports-at-once', 'acme', 3],
  ];
  for (const [policy, key, times] of spent) {
    for (let n = 0; n < times; n += 1) await world.call('/v1/check', { method: 'POST', body: { checks: [{ policy, key }] } });
  }
  await Promise.all([
    user(world, 'alice@example.com', 50, 53),
    user(world, 'newsletter-eu', 400, 331),
    user(world, 'bob@example.com', 20, 15),
    user(world, 'carol@example.com', 100, 12),
  ]);
  for (const [name, plan] of Object.entries({ 'alice@example.com': 'PRO_MONTHLY', 'bob@example.com': 'STARTER_YEARLY', 'ops@acme.example': 'BUSINESS_YEARLY' })) {
    await world.call(`/admin/subscriptions/${encodeURIComponent(name)}`, { method: 'PUT', body: { plan } });
  }
  const authorization = `Bearer ${world.token({ sub: 'dave@example.com' })}`;
  for (let n = 0; n < 11; n += 1) await world.call('/api/v1/ai/chat', { method: 'POST', body: { prompt: 'hello' }, headers: { authorization } });
}

/** @param {World} world */
async function slots(world) {
  await world.call('/admin/rate-limit/config', { method: 'POST', body: { configName: 'payouts', maxPerWindow: 25, windowSize: 'PT4S' } });
  await world.call('/admin/rate-limit/config', { method: 'POST', body: { configName: 'statements', maxPerWindow: 500, windowSize: 'PT1M' } });
  const now = Date.now();
  const lines = [];
  for (let n = 0; n < 4200; n += 1) {
    // Three waves, the last one far ahead.
    const wave = [-180, 120, 900][n % 3] ?? 0;
    const spread = Math.round((Math.sin(n * 12.9898) * 43758.5453) % 240);
    lines.push(JSON.stringify({ eventId: `payout-${String(n).padStart(6, '0')}`, configName: 'payouts', requestedTime: new Date(now + (wave + spread) * 1000).toISOString() }));
  }
  await fetch(`${world.url}/api/v1/slots/bulk`, { method: 'POST', headers: { 'content-type': 'application/x-ndjson', 'x-admin-key': world.adminKey }, body: lines.join('\n') }).then((response) => response.text());
}

/** @param {World} world */
async function requests(world) {
  const kinds = ['pay', 'pay', 'pay', 'refund', 'pay', 'legacy', 'kyc', 'export'];
  const tenants = ['acme', 'globex', 'initech'];
  for (let n = 0; n < 64; n += 1) await submit(world, tenants[n % 3] ?? 'acme', kinds[n % kinds.length] ?? 'pay', `order-${n}`);
  for (let n = 0; n < 6; n += 1) await submit(world, 'globex', 'report', `report-${n}`);
}

/** @param {World} world */
async function sales(world) {
  const at = (/** @type {number} */ seconds) => new Date(Date.now() + seconds * 1000).toISOString();
  const products = [
    { sku: 'TICKET-MAIN', productName: 'Summer concert, standing', initialStock: 1000, startTime: at(0.4), endTime: at(1800) },
    { sku: 'TICKET-VIP', productName: 'Summer concert, front row', initialStock: 40, startTime: at(0.4), endTime: at(1800) },
    { sku: 'POSTER', productName: 'Signed poster', initialStock: 200, startTime: at(3600), endTime: at(7200) },
  ];
  for (const body of products) await world.call('/api/v1/products', { method: 'POST', body });
  for (;;) {
    const { body } = await world.call('/api/v1/sales?sku=TICKET-MAIN');
    if (body.data.state === 'ACTIVE') break;
    await new Promise((wait) => setTimeout(wait, 50));
  }
  for (let n = 0; n < 45; n += 1) await buy(world, 'TICKET-VIP', `fan-${n}@example.com`);
}

/** @param {World} world @param {string} sku @param {string} name */
export async function buy(world, sku, name) {
  await world.call('/api/v1/purchases', { method: 'POST', body: { sku, qty: 1 }, headers: { 'x-user-id': name, 'user-agent': 'Mozilla/5.0' } });
}

/** An ordinary minute: something of everything, until it is told to stop. @param {World} world @param {AbortSignal} signal */
export async function traffic(world, signal) {
  let n = 0;
  while (!signal.aborted) {
    n += 1;
    const busy = 3 + Math.round(3 * Math.sin(n / 9) + 2 * Math.sin(n / 3.1));
    const calls = [];
    for (let one = 0; one < busy; one += 1) {
      calls.push(
        world.call('/api/send', { method: 'POST', body: { userId: ['newsletter-eu', 'carol@example.com', 'alice@example.com'][(n + one) % 3], message: 'hello' } }),
        world.call('/v1/check', { method: 'POST', body: { checks: [{ policy: 'api-per-key', key: 'key_live_41bd' }] } }),
        buy(world, 'TICKET-MAIN', `buyer-${n}-${one}@example.com`),
      );
    }
    if (n % 2 === 0) calls.push(world.call('/api/v1/slots', { method: 'POST', body: { eventId: `live-${n}`, configName: 'payouts', requestedTime: new Date().toISOString() } }));
    if (n % 4 === 0) calls.push(submit(world, 'acme', n % 16 === 0 ? 'kyc' : 'pay', `live-${n}`));
    await Promise.all(calls).catch(() => undefined);
    await new Promise((wait) => setTimeout(wait, 250));
  }
}
