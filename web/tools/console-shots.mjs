// Pictures of every screen of the console, full of data, light and dark: PNG into shots/ to look at, and small WebP for the
// documentation. Needs a binary that contains the page: WEIR_BINARY, by default that of `make run` or of the tests.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';
import { fill, startWorld, traffic } from './world.mjs';

/** @typedef {import('playwright-core').Page} Page */

const web = join(import.meta.dirname, '..');
const shots = join(web, 'shots');
const images = join(web, '../docs/images/console');
const binary = process.env['WEIR_BINARY'] ?? ['../target/quick/weir', '../target/debug/weir'].map((path) => join(web, path)).find((path) => existsSync(path)) ?? '';
const chromiums = ['/usr/bin/chromium-headless-shell', '/usr/bin/chromium'];
/** Long enough for charts with a shape, and for requests to die. */
const WARM_UP_MS = Number(process.env['WARM_UP_MS'] ?? 90_000);

/** The screens, by the name of their picture. @type {Record<string, string>} */
const SCREENS = {
  now: '',
  key: 'key/alice%40example.com',
  requests: 'requests',
  'requests-all': 'requests?view=all',
  request: 'requests/',
  'dead-letters': 'dead',
  slots: 'slots/payouts',
  sale: 'sale/TICKET-MAIN',
  policies: 'policies',
  'policy-preview': 'policies/login-per-address',
  audit: 'audit',
  'first-steps': 'start',
};

mkdirSync(shots, { recursive: true });
mkdirSync(images, { recursive: true });
const wanted = process.argv.slice(2);
const world = await startWorld(binary);
const browser = await chromium.launch({ executablePath: process.env['CHROMIUM'] ?? chromiums.find((path) => existsSync(path)) ?? '', args: ['--no-sandbox'] });
const stop = new AbortController();
try {
  await fill(world);
  void traffic(world, stop.signal);
  await new Promise((wait) => setTimeout(wait, WARM_UP_MS));
  const dead = await world.call('/admin/requests?status=FAILED_RETRY_EXHAUSTED&limit=1');
  SCREENS['request'] += dead.body.items[0]?.requestId ?? '';
  for (const theme of /** @type {const} */ (['light', 'dark'])) {
    await picture('sign-in', theme, 1280, async (page) => void (await page.goto(world.url)));
    for (const [name, hash] of Object.entries(SCREENS)) {
      await picture(name, theme, 1280, (page) => show(page, hash));
    }
    await picture('now-phone', theme, 390, (page) => show(page, ''));
    await picture('key-phone', theme, 390, (page) => show(page, SCREENS['key'] ?? ''));
  }
} finally {
  stop.abort();
  await browser.close();
  await world.stop();
}

/** @param {Page} page @param {string} hash */
async function show(page, hash) {
  await page.goto(`${world.url}/#/${hash}`);
  await page.getByLabel('Admin key or token').fill(world.adminKey);
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.getByText('Live', { exact: true }).waitFor();
  await page.locator('.loading').first().waitFor({ state: 'detached' });
  if (hash === 'policies/login-per-address') await page.getByLabel('Limit', { exact: true }).fill('10');
  if (hash.startsWith('slots')) await page.locator('.heat-cell[data-heat="6"]').first().click();
  // A few snapshots, so that what is live is seen to be.
  await page.waitForTimeout(2500);
}

/** @param {string} name @param {'light' | 'dark'} theme @param {number} width @param {(page: Page) => Promise<void>} scene */
async function picture(name, theme, width, scene) {
  if (wanted.length > 0 && !wanted.includes(name) && !wanted.includes(theme)) return;
  const context = await browser.newContext({ colorScheme: theme, viewport: { width, height: width < 600 ? 844 : 800 }, reducedMotion: 'reduce' });
  const page = await context.newPage();
  await scene(page);
  const path = join(shots, `console-${name}-${theme}.png`);
  await page.screenshot({ path });
  await context.close();
  writeFileSync(join(images, `${name}-${theme}.webp`), await webp(readFileSync(path)));
}

/** The browser can write a format that takes a fifth of the room. @param {Buffer} png */
async function webp(png) {
  const page = await browser.newPage();
  const data = await page.evaluate(async (source) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.width, image.height];
    canvas.getContext('2d')?.drawImage(image, 0, 0);
    return canvas.toDataURL('image/webp', 0.82);
  }, `data:image/png;base64,${png.toString('base64')}`);
  await page.close();
  return Buffer.from(data.split(',')[1] ?? '', 'base64');
}
