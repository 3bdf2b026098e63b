// A stand-in for the Weir server: the sale API, its event stream and the built page, on plain Node. What only tests
// want (faults, cutting streams, the log of requests) is under /__mock.
import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { extname, join, normalize } from 'node:path';
import { Refusal, Sales } from './sales.mjs';

/** @typedef {import('node:http').IncomingMessage} Req */
/** @typedef {import('node:http').ServerResponse} Res */
/**
 * A fault: the next `times` requests of `method` to a path that starts with `path` are answered with `status`, after
 * `delayMs`; with `drop` the connection is cut instead, with `late` only after the request has had its effect.
 * @typedef {{ method?: string, path: string, times?: number, status?: number, delayMs?: number, drop?: boolean, late?: boolean, retryAfter?: number }} Fault
 */

const TYPES = /** @type {Record<string, string>} */ ({
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.svg': 'image/svg+xml',
});

export const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/** @typedef {{ provider: string, siteKey: string, interactiveSiteKey: string | null, scriptUrl: string, verifyUrl: string, secret: string, interactiveSecret: string }} MockChallenge */

/** The settings of Weir that change what the page does, under Weir's own names. @param {Record<string, string | undefined>} env */
export function settingsOf(env) {
  /** @param {string} name */
  const value = (name) => env[`WEIR_SALE_${name}`] ?? '';
  const secret = value('CHALLENGE_SECRET');
  const challenge = value('CHALLENGE_PROVIDER') === '' ? null : {
    provider: value('CHALLENGE_PROVIDER'),
    siteKey: value('CHALLENGE_SITE_KEY'),
    interactiveSiteKey: value('CHALLENGE_INTERACTIVE_SITE_KEY') || null,
    scriptUrl: value('CHALLENGE_SCRIPT_URL'),
    verifyUrl: value('CHALLENGE_VERIFY_URL'),
    secret,
    interactiveSecret: value('CHALLENGE_INTERACTIVE_SECRET') || secret,
  };
  return { identity: value('IDENTITY') || 'header', challenge };
}

/** What the page is told, and the policy with its challenge. @param {string} html @param {ReturnType<typeof settingsOf>} settings */
function prepare(html, { identity, challenge }) {
  if (identity === 'header' && challenge === null) return { html, csp: CSP };
  const { verifyUrl: _, secret: __, interactiveSecret: ___, ...shown } = challenge ?? {};
  const json = JSON.stringify({ identity, challenge: challenge && shown });
  const tag = `<meta name="weir-sale" content="${json.replaceAll('&', '&amp;').replaceAll('"', '&quot;')}" /></head>`;
  const origin = challenge ? new URL(challenge.scriptUrl).origin : '';
  const opened = CSP.replace(/'self'/g, `'self' ${origin}`).replace("require-trusted-types-for 'script'", `frame-src ${origin}`);
  return { html: html.replace('</head>', tag), csp: challenge ? opened : CSP };
}

/**
 * The three bands of scores. hCaptcha's score is a risk.
 * @param {MockChallenge} challenge @param {{ challengeToken?: string, challengeKind?: string } | undefined} body
 */
async function isPerson(challenge, body) {
  const secret = body?.challengeKind === 'interactive' ? challenge.interactiveSecret : challenge.secret;
  const form = new URLSearchParams({ secret, response: body?.challengeToken ?? '', remoteip: '127.0.0.1' });
  const verdict = /** @type {{ success: boolean, score?: number }} */ (await (await fetch(challenge.verifyUrl, { method: 'POST', body: form })).json());
  const score = verdict.score === undefined ? 1 : challenge.provider === 'hcaptcha' ? 1 - verdict.score : verdict.score;
  return verdict.success && score >= 0.3;
}

/** Believes every token. @param {string | undefined} authorization */
function subjectOf(authorization) {
  const payload = authorization?.split('.')[1];
  if (payload === undefined) throw new Refusal(401, 'UNAUTHORIZED', 'Missing, invalid or expired bearer token.');
  return /** @type {{ sub: string }} */ (JSON.parse(Buffer.from(payload, 'base64url').toString())).sub;
}

const CODES = /** @type {Record<number, string>} */ ({ 429: 'RATE_LIMITED', 503: 'SERVICE_UNAVAILABLE', 404: 'NOT_FOUND' });

/** @param {{ adminKey?: string, file?: string | undefined, userPerSecond?: number, ssePerIp?: number, dist?: string, heartbeatMs?: number, settings?: ReturnType<typeof settingsOf> }} [options] */
export function createMock(options = {}) {
  const { adminKey = 'test-admin-key', file, userPerSecond = 1, ssePerIp = 0, dist, heartbeatMs = 30_000, settings = settingsOf({}) } = options;
  /** @type {Map<Res, string | null>} */
  const streams = new Map();
  /** @type {Fault[]} */
  let faults = [];
  /** @type {object[]} */
  const log = [];
  /** @type {Map<string, number>} */
  const lastAttempt = new Map();
  const sales = new Sales({
    file,
    publish(event) {
      for (const [res, sku] of streams) if (sku === null || sku === event.data.sku) res.write(frame(event));
    },
  });

  /** @param {import('./sales.mjs').SaleEvent} event */
  function frame({ id, event, data }) {
    return `event: ${event}\nid: ${id}\ndata: ${JSON.stringify(data)}\n\n`;
  }

  /** @param {Req} req */
  function requireAdmin(req) {
    if (req.headers['x-admin-key'] !== adminKey) throw new Refusal(401, 'UNAUTHORIZED', 'Missing or invalid X-Admin-Key header.');
  }

  /** @param {unknown} userId */
  function throttle(userId) {
    if (userPerSecond <= 0 || typeof userId !== 'string') return;
    const gap = 1000 / userPerSecond;
    const now = Date.now();
    if (now - (lastAttempt.get(userId) ?? 0) < gap) {
      throw new Refusal(429, 'RATE_LIMITED', 'Too many requests. Please try again shortly.', { retryAfter: Math.max(1, Math.ceil(gap / 1000)) });
    }
    lastAttempt.set(userId, now);
  }

  /**
   * @param {Req} req
   * @param {Res} res
   * @param {string | null} sku
   */
  function stream(req, res, sku) {
    if (ssePerIp > 0 && streams.size >= ssePerIp) throw new Refusal(429, 'RATE_LIMITED', 'Too many streams.', { retryAfter: 1 });
    const row = sales.pick(sku);
    const last = Number(req.headers['last-event-id'] ?? NaN);
    res.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-store' });
    const { state, stock, startTime, endTime } = sales.status(row);
    // As the server: what was missed, if it is still known, or the present state.
    const oldest = sales.history[0]?.id ?? sales.lastId + 1;
    const resumes = !Number.isNaN(last) && last <= sales.lastId && last >= oldest - 1;
    const id = resumes ? last : sales.lastId;
    res.write(resumes ? ': resumed\n\n' : frame({ id, event: 'initial', data: { sku: row.sku, state, stock, startTime, endTime } }));
    for (const event of sales.history) if (event.id > id && (sku === null || sku === event.data.sku)) res.write(frame(event));
    streams.set(res, sku);
    const beat = setInterval(() => res.write(': heartbeat\n\n'), heartbeatMs);
    res.on('close', () => {
      clearInterval(beat);
      streams.delete(res);
    });
  }

  /**
   * @param {Req} req
   * @param {URL} url
   * @param {unknown} body
   * @returns {[number, unknown]}
   */
  function route(req, url, body) {
    const sku = url.searchParams.get('sku');
    const ofBuyer = url.pathname === '/api/v1/purchases';
    const userId = ofBuyer && settings.identity === 'token' ? subjectOf(req.headers.authorization) : req.headers['x-user-id'];
    const product = /^\/api\/v1\/products\/([^/]+)$/.exec(url.pathname)?.[1];
    const at = `${req.method} ${product === undefined ? url.pathname : '/api/v1/products/:sku'}`;
    if (url.pathname.startsWith('/api/v1/products')) requireAdmin(req);
    const named = decodeURIComponent(product ?? '');
    switch (at) {
      case 'GET /api/v1/sales':
        return [200, sales.status(sales.pick(sku))];
      case 'POST /api/v1/purchases':
        throttle(userId);
        return [200, sales.buy(userId, body)];
      case 'GET /api/v1/purchases':
        return [200, sales.find(userId, sku)];
      case 'POST /api/v1/products':
        return [201, sales.create(body)];
      case 'GET /api/v1/products':
        return [200, { items: Object.values(sales.rows).map((row) => sales.fullProduct(row)), nextCursor: null }];
      case 'GET /api/v1/products/:sku':
        return [200, sales.fullProduct(sales.pick(named))];
      case 'PUT /api/v1/products/:sku':
        return [200, sales.update(named, body)];
      case 'DELETE /api/v1/products/:sku':
        return [200, sales.reset(named)];
      case 'GET /health':
        return [200, { status: 'healthy', uptime: Math.floor(process.uptime()), checks: {} }];
    }
    throw new Refusal(404, 'NOT_FOUND', 'No such route.');
  }

  /**
   * @param {Res} res
   * @param {number} status
   * @param {unknown} body
   * @param {Record<string, string>} [headers]
   */
  function send(res, status, body, headers = {}) {
    res.writeHead(status, { 'Content-Type': 'application/json', 'Cache-Control': 'no-store', ...headers });
    res.end(JSON.stringify(body));
  }

  /**
   * @param {Res} res
   * @param {Refusal} refusal
   */
  function refuse(res, refusal) {
    const retry = /** @type {{ retryAfter?: number }} */ (refusal.more).retryAfter;
    const error = { code: refusal.code, message: refusal.message, ...refusal.more };
    send(res, refusal.status, { success: false, error }, retry ? { 'Retry-After': String(retry) } : {});
  }

  /** @param {string} method @param {string} path */
  function takeFault(method, path) {
    const fault = faults.find((f) => path.startsWith(f.path) && (f.method ?? method) === method);
    if (fault) {
      fault.times = (fault.times ?? 1) - 1;
      faults = faults.filter((f) => (f.times ?? 1) > 0);
    }
    return fault;
  }

  /**
   * @param {Req} req
   * @param {Res} res
   * @param {URL} url
   * @param {string} text
   */
  async function api(req, res, url, text) {
    const fault = takeFault(req.method ?? '', url.pathname);
    if (fault?.delayMs) await new Promise((resolve) => setTimeout(resolve, fault.delayMs));
    if (fault?.drop && !fault.late) return void res.destroy();
    if (fault?.status) {
      const more = fault.retryAfter ? { retryAfter: fault.retryAfter } : {};
      return refuse(res, new Refusal(fault.status, CODES[fault.status] ?? 'FAULT', 'A fault that a test asked for.', more));
    }
    if (`${req.method} ${url.pathname}` === 'GET /api/v1/sales/events') return stream(req, res, url.searchParams.get('sku'));
    const { challenge } = settings;
    if (challenge && `${req.method} ${url.pathname}` === 'POST /api/v1/purchases' && !(await isPerson(challenge, JSON.parse(text)))) {
      throw new Refusal(200, 'CHALLENGE_REQUIRED', 'Please solve the challenge and try again.');
    }
    const [status, data] = route(req, url, text === '' ? undefined : JSON.parse(text));
    if (fault?.drop) return void res.destroy();
    const cache = url.pathname === '/api/v1/sales' ? { 'Cache-Control': 'public, max-age=1' } : {};
    send(res, status, { success: true, data }, /** @type {Record<string, string>} */ (cache));
  }

  /**
   * @param {Req} req
   * @param {Res} res
   * @param {URL} url
   * @param {string} text
   */
  function control(req, res, url, text) {
    const at = `${req.method} ${url.pathname}`;
    if (at === 'POST /__mock/faults') faults.push(JSON.parse(text));
    else if (at === 'DELETE /__mock/faults') faults = [];
    else if (at === 'DELETE /__mock/streams') for (const open of streams.keys()) open.destroy();
    send(res, 200, at === 'GET /__mock/log' ? log : {});
  }

  /**
   * @param {Res} res
   * @param {string} path
   */
  async function page(res, path) {
    const name = path === '/sale/' ? 'index.html' : normalize(path.slice('/sale/'.length));
    if (!dist || name.startsWith('..')) return send(res, 404, {});
    try {
      const file = await readFile(join(dist, name));
      const { html, csp } = name === 'index.html' ? prepare(String(file), settings) : { html: file, csp: CSP };
      const hashed = name.startsWith('assets/');
      res.writeHead(200, {
        'Content-Type': TYPES[extname(name)] ?? 'application/octet-stream',
        'Content-Security-Policy': csp,
        'Cache-Control': hashed ? 'public, max-age=31536000, immutable' : 'no-cache',
        'X-Content-Type-Options': 'nosniff',
        'Referrer-Policy': 'no-referrer',
      });
      res.end(html);
    } catch {
      send(res, 404, {});
    }
  }

  const server = createServer(async (req, res) => {
    const url = new URL(req.url ?? '/', 'http://mock');
    try {
      let text = '';
      for await (const chunk of req) text += chunk;
      if (url.pathname.startsWith('/__mock/')) return control(req, res, url, text);
      if (url.pathname.startsWith('/sale/')) return await page(res, url.pathname);
      log.push({ at: Date.now(), method: req.method, path: req.url, lastEventId: req.headers['last-event-id'] ?? null, userId: req.headers['x-user-id'] ?? null });
      await api(req, res, url, text);
    } catch (error) {
      if (error instanceof Refusal) refuse(res, error);
      else if (error instanceof SyntaxError) refuse(res, new Refusal(400, 'VALIDATION_ERROR', 'The body is not JSON.'));
      else throw error;
    }
  });

  return {
    server,
    sales,
    /** @param {number} port */
    listen: (port) => new Promise((resolve) => server.listen(port, '127.0.0.1', () => resolve(undefined))),
    close() {
      sales.close();
      server.close();
      server.closeAllConnections();
    },
  };
}
