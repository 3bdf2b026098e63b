// Usable without a mouse, without sight, and without motion.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import type { AxeResults } from 'axe-core';
import type { Page } from 'playwright-core';
import { describe, expect, it } from 'vitest';
import {
  ADMIN_KEY,
  activeSale,
  adminUrl,
  buyAs,
  buyElsewhere,
  createSale,
  nameField,
  openSale,
  outcome,
  saleState,
  someone,
  useBrowser,
  useServer,
} from './harness';

const server = useServer();
const browser = useBrowser();
const axeSource = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

const RULES = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];

interface Axe {
  run(context: object, options: object): Promise<AxeResults>;
}

/**
 * axe does not see that the dry figures are cut at the water's surface and holds their colour against the water, so
 * it looks at them only once the basin is empty.
 */
async function violations(page: Page): Promise<string[]> {
  await page.evaluate(axeSource);
  const results = await page.evaluate((runOnly) => {
    const exclude = document.querySelector('.gauge[aria-valuenow="0"]') ? [] : ['.gauge > .face'];
    return (window as unknown as { axe: Axe }).axe.run({ exclude }, { runOnly });
  }, RULES);
  return results.violations.map((found) => `${found.id}: ${found.nodes.map((node) => node.html).join(' | ')}`);
}

async function focused(page: Page): Promise<string> {
  return page.evaluate(() => document.activeElement?.textContent ?? '');
}

it('a purchase needs nothing but a keyboard', async () => {
  const sku = await activeSale(server);
  const page = await openSale(await browser.page(), server, sku);
  await page.keyboard.press('Tab');
  expect(await nameField(page).evaluate((el) => el === document.activeElement)).toBe(true);
  await page.keyboard.press('Enter');
  expect(await page.locator('.field-error').isVisible()).toBe(true);
  await page.keyboard.type(someone());
  await page.keyboard.press('Tab');
  expect(await focused(page)).toBe('Buy one');
  const ring = await page.evaluate(() => getComputedStyle(document.activeElement as Element).outlineStyle);
  expect(ring).toBe('solid');
  await page.keyboard.press('Space');
  await outcome(page, 'confirmed').waitFor();
  expect(await focused(page)).toBe('You got one');
});

it('when the sale ends under the focus, the focus moves to what happened', async () => {
  const sku = await activeSale(server, { stock: 1 });
  const page = await openSale(await browser.page(), server, sku);
  await nameField(page).focus();
  await buyElsewhere(server, sku);
  await expect.poll(() => saleState(page)).toBe('Sold out');
  await expect.poll(() => focused(page)).toBe('Sold out');
});

it('turns and the last units are announced, single ticks are not', async () => {
  const sku = await createSale(server, { stock: 3, startsInMs: 4000 });
  const page = await openSale(await browser.page(), server, sku);
  const said = page.getByTestId('announcer');
  expect(await said.getAttribute('role')).toBe('status');
  expect(await said.textContent()).toBe('');
  await expect.poll(() => said.textContent()).toBe('The sale is open. 3 units available.');
  await buyElsewhere(server, sku);
  await expect.poll(() => said.textContent()).toBe('2 units left.');
});

it('nothing moves for those who asked for that', async () => {
  const sku = await activeSale(server);
  const page = await openSale(await browser.page({ reducedMotion: 'reduce' }), server, sku);
  expect(await page.evaluate(() => document.getAnimations().length)).toBe(0);
});

describe.each(['light', 'dark'] as const)('axe finds nothing in %s', (colorScheme) => {
  it('before, during and after a purchase', async () => {
    const upcoming = await createSale(server, { startsInMs: 60_000 });
    const page = await openSale(await browser.page({ colorScheme, reducedMotion: 'reduce' }), server, upcoming);
    expect(await violations(page)).toEqual([]);
    const sku = await activeSale(server, { stock: 2 });
    await openSale(page, server, sku);
    await page.getByRole('button', { name: 'Buy one' }).click();
    expect(await violations(page)).toEqual([]);
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    expect(await violations(page)).toEqual([]);
    await buyElsewhere(server, sku);
    await expect.poll(() => saleState(page)).toBe('Sold out');
    expect(await violations(page)).toEqual([]);
  });

  it('in the admin, on a phone', async () => {
    const sku = await createSale(server, { startsInMs: 60_000 });
    const page = await browser.page({ colorScheme, reducedMotion: 'reduce', viewport: { width: 360, height: 740 } });
    await page.goto(adminUrl(server));
    expect(await violations(page)).toEqual([]);
    await page.getByLabel('Admin key').fill(ADMIN_KEY);
    await page.getByRole('button', { name: 'Continue' }).click();
    await page.getByRole('button', { name: sku }).click();
    expect(await violations(page)).toEqual([]);
    await page.getByRole('button', { name: 'Reset this sale' }).click();
    expect(await violations(page)).toEqual([]);
  });
});

it('nothing is cut off or scrolls sideways, from a small phone to a desktop', async () => {
  const sku = await activeSale(server);
  const page = await openSale(await browser.page(), server, sku);
  for (const width of [320, 390, 768, 1280]) {
    await page.setViewportSize({ width, height: 800 });
    expect(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)).toBeLessThanOrEqual(0);
    expect((await page.getByRole('button', { name: 'Buy one' }).boundingBox())?.height).toBeGreaterThanOrEqual(44);
  }
});
