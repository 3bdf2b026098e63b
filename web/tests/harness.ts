// What every browser test needs: a server, a browser, a sale of its own, and a page that may not raise errors.
//
// The server is the mock as a child process, so that it can be killed; with WEIR_BINARY set, that program's `serve`. With
// WEIR_URL (and WEIR_ADMIN_KEY) set, the tests run against that server instead. Those that need faults, or a kill, where
// there are none say that they were left out.
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { chromium } from 'playwright-core';
import type { Browser, BrowserContext, BrowserContextOptions, Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, expect } from 'vitest';

const EXTERNAL = process.env['WEIR_URL'];
const BINARY = process.env['WEIR_BINARY'];
export const ADMIN_KEY = process.env['WEIR_ADMIN_KEY'] ?? 'the-admin-key-of-these-tests';
export const ownServer = EXTERNAL === undefined;
export const canFail = ownServer && BINARY === undefined;
/** The first has no window to draw, and costs half as much. */
const CHROMIUMS = ['/usr/bin/chromium-headless-shell', '/usr/bin/chromium'];
const PAGE_PATH = '/sale/';
const MAIN = join(import.meta.dirname, '../mock/main.mjs');

export interface LogEntry {
  at: number;
  method: string;
  path: string;
  lastEventId: string | null;
  userId: string | null;
}

export interface Server {
  url: string;
  kill(): Promise<void>;
  restart(): Promise<void>;
  fault(fault: object): Promise<void>;
  cutStreams(): Promise<void>;
  log(): Promise<LogEntry[]>;
}

async function launch(port: number, folder: string, settings: Record<string, string>): Promise<{ child: ChildProcess; url: string }> {
  const mock = [MAIN, '--port', String(port), '--state', join(folder, 'state.json')];
  const child = spawn(BINARY === undefined ? process.execPath : resolve(BINARY), BINARY === undefined ? mock : ['serve'], {
    cwd: folder,
    env: {
      ...process.env,
      ...settings,
      WEIR_ADMIN_KEY: ADMIN_KEY,
      WEIR_DATA: folder,
      WEIR_LISTEN: `127.0.0.1:${port}`,
      WEIR_GRPC_LISTEN: '127.0.0.1:0',
    },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const url = await new Promise<string>((found, failed) => {
    let output = '';
    child.stdout?.on('data', (data) => {
      output = (output + String(data)).slice(-65_536);
      const ready = /http:\/\/127\.0\.0\.1:\d+/.exec(output);
      if (ready) found(ready[0]);
    });
    child.once('error', failed);
    child.once('exit', (code) => failed(new Error(`the server ended with ${code}: ${output}`)));
  });
  return { child, url };
}

/** `settings` are Weir's, by their names in the environment; the mock knows those that change the page. */
export function useServer(settings: () => Promise<Record<string, string>> = async () => ({})): Server {
  let child: ChildProcess;
  const folder = mkdtempSync(join(tmpdir(), 'weir-page-'));
  const control = (method: string, path: string, body?: object) =>
    fetch(`${server.url}/__mock/${path}`, { method, ...(body ? { body: JSON.stringify(body) } : {}) });

  async function start(port: number): Promise<void> {
    const launched = await launch(port, folder, await settings());
    child = launched.child;
    server.url = launched.url;
  }

  const server: Server = {
    url: EXTERNAL ?? '',
    kill: () =>
      new Promise((done) => {
        child.once('exit', () => done());
        child.kill('SIGKILL');
      }),
    restart: () => start(Number(new URL(server.url).port)),
    fault: async (fault) => void (await control('POST', 'faults', fault)),
    cutStreams: async () => void (await control('DELETE', 'streams')),
    log: async () => (await (await control('GET', 'log')).json()) as LogEntry[],
  };

  beforeAll(async () => {
    if (ownServer) await start(0);
  });
  afterEach(async () => {
    if (canFail) await control('DELETE', 'faults');
  });
  afterAll(async () => {
    if (ownServer) await server.kill();
    rmSync(folder, { recursive: true, force: true });
  });
  return server;
}

export interface Browsers {
  /** A fresh browser profile. */
  context(options?: BrowserContextOptions): Promise<BrowserContext>;
  page(options?: BrowserContextOptions): Promise<Page>;
}

export function useBrowser(): Browsers {
  const path = process.env['CHROMIUM'] ?? CHROMIUMS.find((path) => existsSync(path)) ?? '';
  let browser: Browser;
  const problems: string[] = [];
  let contexts: BrowserContext[] = [];

  beforeAll(async () => {
    if (!existsSync(path)) throw new Error(`Chromium is needed: ${CHROMIUMS.join(' or ')}, or where CHROMIUM says it is`);
    browser = await chromium.launch({ executablePath: path, args: ['--no-sandbox'] });
  });
  afterEach(async () => {
    await Promise.all(contexts.map((context) => context.close()));
    contexts = [];
    // An uncaught error or a breach of the Content-Security-Policy fails whatever test it happened in.
    expect(problems.splice(0)).toEqual([]);
  });
  afterAll(() => browser?.close());

  async function context(options: BrowserContextOptions = {}): Promise<BrowserContext> {
    const made = await browser.newContext({ viewport: { width: 1100, height: 800 }, ...options });
    made.setDefaultTimeout(60_000);
    contexts.push(made);
    made.on('weberror', (error) => problems.push(String(error.error())));
    made.on('console', (message) => {
      if (/Content Security Policy|Trusted Type/i.test(message.text())) problems.push(message.text());
    });
    return made;
  }

  return { context, page: async (options) => (await context(options)).newPage() };
}

export interface SaleOptions {
  stock?: number;
  startsInMs?: number;
  lastsMs?: number;
}

let made = 0;

/** Creates a sale through the API alone, and gives its sku. */
export async function createSale(server: Server, { stock = 10, startsInMs = 300, lastsMs = 120_000 }: SaleOptions = {}): Promise<string> {
  made += 1;
  const sku = `T-${process.pid}-${Date.now()}-${made}`;
  const start = Date.now() + startsInMs;
  const response = await fetch(`${server.url}/api/v1/products`, {
    method: 'POST',
    headers: { 'X-Admin-Key': ADMIN_KEY, 'Content-Type': 'application/json' },
    body: JSON.stringify({
      sku,
      productName: 'Limited Edition Widget',
      initialStock: stock,
      startTime: new Date(start).toISOString(),
      endTime: new Date(start + lastsMs).toISOString(),
    }),
  });
  expect(response.status).toBe(201);
  return sku;
}

export async function activeSale(server: Server, options: SaleOptions = {}): Promise<string> {
  const sku = await createSale(server, options);
  await expect.poll(async () => (await status(server, sku)).state).toBe('ACTIVE');
  return sku;
}

export async function status(server: Server, sku: string): Promise<{ state: string; stock: number; startTime: string }> {
  const response = await fetch(`${server.url}/api/v1/sales?sku=${sku}`);
  return ((await response.json()) as { data: { state: string; stock: number; startTime: string } }).data;
}

/** A buyer of one's own: the server takes one attempt a second from each, whatever the sale. */
export function someone(): string {
  made += 1;
  return `buyer-${process.pid}-${made}@example.com`;
}

/** Buys behind the page's back, and gives the purchase number. */
export async function buyElsewhere(server: Server, sku: string, userId = someone()): Promise<string> {
  const response = await fetch(`${server.url}/api/v1/purchases`, {
    method: 'POST',
    headers: { 'X-User-Id': userId, 'Content-Type': 'application/json' },
    body: JSON.stringify({ sku, qty: 1 }),
  });
  const answer = (await response.json()) as { success: boolean; data?: { purchaseNo: string } };
  expect(answer).toMatchObject({ success: true });
  return answer.data?.purchaseNo ?? '';
}

export async function openSale(page: Page, server: Server, sku: string): Promise<Page> {
  await page.goto(`${server.url}${PAGE_PATH}?sku=${sku}`);
  await page.getByRole('meter').waitFor();
  return page;
}

export const adminUrl = (server: Server) => `${server.url}${PAGE_PATH}admin.html`;

export const nameField = (page: Page) => page.getByRole('textbox', { name: 'Your e-mail address or user name' });
export const buyButton = (page: Page) => page.locator('button[type=submit]');
export const outcome = (page: Page, kind: string) => page.locator(`[data-outcome="${kind}"]`);
export const notice = (page: Page, kind: string) => page.locator(`[data-notice="${kind}"]`);
export const saleState = (page: Page) => page.getByTestId('state').textContent();
export const stockShown = async (page: Page) => Number(await page.getByRole('meter').getAttribute('aria-valuenow'));
export const linkShown = (page: Page) => page.locator('[data-link]').getAttribute('data-link');

export async function buyAs(page: Page, userId: string): Promise<void> {
  await nameField(page).fill(userId);
  await page.getByRole('button', { name: 'Buy one' }).click();
}
