// Pictures of every state, phone and desktop, light and dark, into shots/; with a contact sheet per variant.
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';
import { createMock } from '../mock/server.mjs';

/** @typedef {import('playwright-core').Page} Page */
/** @typedef {import('../mock/sales.mjs').Row} Row */

const web = join(import.meta.dirname, '..');
const out = join(web, 'shots');
mkdirSync(out, { recursive: true });

const mock = createMock({ dist: join(web, 'dist'), userPerSecond: 0 });
await mock.listen(0);
const address = mock.server.address();
const base = `http://127.0.0.1:${typeof address === 'object' ? address?.port : ''}`;

const MINUTE = 60_000;
const now = Date.now();
const bought = { purchaseNo: 'PUR-20260215-0042', purchasedAt: new Date(now - 9000).toISOString() };

/** @param {Partial<Row>} change @param {number} [sold] */
function sale(change, sold = 0) {
  const buyers = Object.fromEntries(Array.from({ length: sold }, (_, n) => [`b${n}`, bought]));
  const sku = `WIDGET-${String(Object.keys(mock.sales.rows).length + 1).padStart(3, '0')}`;
  mock.sales.rows[sku] = /** @type {Row} */ ({
    sku, productName: 'Limited Edition Widget', initialStock: 100, startTime: now - MINUTE, endTime: now + 29 * MINUTE,
    createdAt: new Date(now).toISOString(), state: 'ACTIVE', reason: null, buyers, ...change,
  });
  return sku;
}

/** @param {Page} page @param {string} [name] */
async function buy(page, name = 'ada@example.com') {
  await page.getByRole('textbox').fill(name);
  await page.getByRole('button', { name: 'Buy one' }).click();
}

/** @param {object} fault */
const fault = (fault) => fetch(`${base}/__mock/faults`, { method: 'POST', body: JSON.stringify(fault) });
const clear = () => fetch(`${base}/__mock/faults`, { method: 'DELETE' });

/** @type {Record<string, (page: Page) => Promise<void>>} */
const scenes = {
  upcoming: (page) => open(page, sale({ state: 'UPCOMING', startTime: now + 12 * MINUTE, endTime: now + 42 * MINUTE })),
  'upcoming-days': (page) =>
    open(page, sale({ state: 'UPCOMING', initialStock: 25_000, productName: 'An unusually long product name that has to wrap somewhere', startTime: now + 3000 * MINUTE, endTime: now + 3030 * MINUTE })),
  active: (page) => open(page, sale({}, 38)),
  low: (page) => open(page, sale({}, 97)),
  invalid: async (page) => {
    await open(page, sale({}, 60));
    await page.getByRole('button', { name: 'Buy one' }).click();
  },
  confirmed: async (page) => {
    await open(page, sale({}, 41));
    await buy(page);
    await page.locator('[data-outcome]').waitFor();
  },
  already: async (page) => {
    await open(page, sale({}, 41));
    await buy(page, 'b7');
    await page.locator('[data-outcome]').waitFor();
  },
  soldOut: async (page) => {
    const sku = sale({ initialStock: 50 }, 49);
    await open(page, sku);
    await page.route('**/api/v1/purchases', (route) => {
      mock.sales.buy('somebody else', { sku, qty: 1 });
      return route.continue();
    });
    await buy(page);
    await page.locator('[data-outcome]').waitFor();
  },
  'sold-out-unattended': (page) => open(page, sale({ state: 'ENDED', reason: 'SOLD_OUT' }, 100)),
  ended: (page) => open(page, sale({ state: 'ENDED', reason: 'TIME_EXPIRED', startTime: now - 40 * MINUTE, endTime: now - 10 * MINUTE }, 71)),
  notActive: async (page) => {
    const sku = sale({}, 71);
    await open(page, sku);
    await page.route('**/api/v1/purchases', (route) => {
      const row = mock.sales.rows[sku];
      if (row) row.endTime = Date.now() - 1;
      return route.continue();
    });
    await buy(page);
    await page.locator('[data-outcome]').waitFor();
  },
  throttled: async (page) => {
    await open(page, sale({}, 20));
    await fault({ path: '/api/v1/purchases', status: 429, retryAfter: 9 });
    await buy(page);
    await page.locator('[data-notice]').waitFor();
  },
  checking: async (page) => {
    await open(page, sale({}, 20));
    await fault({ path: '/api/v1/purchases', times: 50, drop: true });
    await buy(page);
    await page.locator('[data-notice]').waitFor();
  },
  offline: async (page) => {
    await fault({ path: '/api/v1/sales', times: 50, drop: true });
    await page.goto(`${base}/sale/`);
    await page.getByText('cannot be reached').first().waitFor();
  },
  none: async (page) => {
    await page.goto(`${base}/sale/?sku=NONE`);
    await page.getByText('No sale is planned').waitFor();
  },
  'admin-gate': async (page) => void (await page.goto(`${base}/sale/admin.html`)),
  'admin-new': async (page) => {
    await admin(page);
    await page.getByRole('button', { name: 'Create product' }).click();
  },
  'admin-edit': async (page) => {
    const sku = sale({ state: 'UPCOMING', productName: 'Edited Widget', startTime: now + 12 * MINUTE, endTime: now + 42 * MINUTE });
    await admin(page);
    await page.getByRole('button', { name: sku }).click();
  },
  'admin-reset': async (page) => {
    const sku = sale({ productName: 'Running Widget' }, 33);
    await admin(page);
    await page.getByRole('button', { name: sku }).click();
    await page.getByRole('button', { name: 'Reset this sale' }).click();
  },
};

/** @param {Page} page @param {string} sku */
async function open(page, sku) {
  await page.goto(`${base}/sale/?sku=${sku}`);
  await page.locator('[data-link="live"]').waitFor();
}

/** @param {Page} page */
async function admin(page) {
  await page.goto(`${base}/sale/admin.html`);
  await page.getByLabel('Admin key').fill('test-admin-key');
  await page.getByRole('button', { name: 'Continue' }).click();
  await page.locator('.bench-list li').first().waitFor();
}

const variants = /** @type {const} */ ([
  ['phone', 'light', 390, 780],
  ['phone', 'dark', 390, 780],
  ['desktop', 'light', 1280, 800],
  ['desktop', 'dark', 1280, 800],
]);
const wanted = process.argv.slice(2);

const browser = await chromium.launch({ executablePath: process.env['CHROMIUM'] ?? '/usr/bin/chromium', args: ['--no-sandbox'] });
try {
  for (const [form, theme, width, height] of variants) {
    if (wanted.some((word) => word.includes('/')) && !wanted.includes(`${form}/${theme}`)) continue;
    mock.sales.rows = {};
    const names = [];
    for (const [name, scene] of Object.entries(scenes)) {
      const picked = wanted.filter((word) => !word.includes('/'));
      if (picked.length > 0 && !picked.includes(name)) continue;
      const context = await browser.newContext({ colorScheme: theme, viewport: { width, height }, reducedMotion: 'reduce' });
      const page = await context.newPage();
      await scene(page);
      await page.waitForTimeout(150);
      await page.screenshot({ path: join(out, `${form}-${theme}-${name}.png`), fullPage: true });
      await context.close();
      await clear();
      names.push(name);
    }
    await contactSheet(`${form}-${theme}`, names, form === 'phone' ? 260 : 480);
  }
} finally {
  await browser.close();
  mock.close();
}

/** @param {string} variant @param {string[]} names @param {number} width */
async function contactSheet(variant, names, width) {
  const cells = names.map((name) => {
    const data = readFileSync(join(out, `${variant}-${name}.png`)).toString('base64');
    return `<figure style="margin:0"><figcaption>${name}</figcaption><img width="${width}" src="data:image/png;base64,${data}"></figure>`;
  });
  const page = await browser.newPage({ viewport: { width: 1500, height: 800 } });
  await page.setContent(`<body style="display:flex;flex-wrap:wrap;gap:10px;font:12px sans-serif;background:#999;margin:8px;align-items:flex-start">${cells.join('')}`);
  writeFileSync(join(out, `sheet-${variant}.png`), await page.screenshot({ fullPage: true }));
  await page.close();
}
