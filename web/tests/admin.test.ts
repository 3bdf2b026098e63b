// The product admin against the API.
import { expect, it } from 'vitest';
import type { Page } from 'playwright-core';
import { ADMIN_KEY, activeSale, adminUrl, createSale, canFail, status, useBrowser, useServer } from './harness';

const server = useServer();
const browser = useBrowser();

async function enter(page: Page, key = ADMIN_KEY): Promise<Page> {
  await page.goto(adminUrl(server));
  await page.getByLabel('Admin key').fill(key);
  await page.getByRole('button', { name: 'Continue' }).click();
  return page;
}

async function enterBench(page: Page): Promise<Page> {
  await enter(page);
  await page.getByRole('heading', { name: 'New product' }).waitFor();
  return page;
}

const stored = (page: Page) =>
  page.evaluate(() => ({ local: JSON.stringify(localStorage), session: JSON.stringify(sessionStorage), cookie: document.cookie, url: location.href }));

it('a wrong key is refused and asked for again', async () => {
  const page = await enter(await browser.page(), 'wrong');
  await page.getByText('The server refused this key.').waitFor();
});

it('the key stays in memory unless asked for, and never leaves the tab', async () => {
  const page = await enterBench(await browser.page());
  expect(JSON.stringify(await stored(page))).not.toContain(ADMIN_KEY);
  await page.reload();
  await page.getByLabel('Keep it until this tab is closed').check();
  await page.getByLabel('Admin key').fill(ADMIN_KEY);
  await page.getByRole('button', { name: 'Continue' }).click();
  await page.getByRole('heading', { name: 'New product' }).waitFor();
  const kept = await stored(page);
  expect(kept.session).toContain(ADMIN_KEY);
  expect(kept.local + kept.cookie + kept.url).not.toContain(ADMIN_KEY);
  await page.getByRole('button', { name: 'Forget the key' }).click();
  expect(JSON.stringify(await stored(page))).not.toContain(ADMIN_KEY);
});

it('a product is created, edited and reset', async () => {
  const sku = `ADM-${process.pid}-${Date.now()}`;
  const page = await enterBench(await browser.page());
  await page.getByRole('button', { name: 'Create product' }).click();
  await page.getByText('Enter a SKU.').waitFor();
  await page.getByLabel('SKU').fill(sku);
  await page.getByLabel('Product name').fill('Made in a test');
  await page.getByLabel('Units on sale').fill('7');
  await page.getByRole('button', { name: 'Create product' }).click();
  await page.getByText(`${sku} was created.`).waitFor();
  expect(await status(server, sku)).toMatchObject({ state: 'UPCOMING', stock: 7, productName: 'Made in a test' });

  let sent = '';
  page.on('request', (request) => void (sent = request.method() === 'PUT' ? (request.postData() ?? '') : sent));
  await page.getByLabel('Units on sale').fill('9');
  await page.getByRole('button', { name: 'Save changes' }).click();
  await page.getByText(`${sku} was saved.`).waitFor();
  expect(JSON.parse(sent)).toEqual({ initialStock: 9 });
  expect((await status(server, sku)).stock).toBe(9);

  await page.getByRole('button', { name: 'Reset this sale' }).click();
  await page.getByRole('button', { name: 'Delete everything' }).click();
  await page.getByText(`Type ${sku} to go on.`).waitFor();
  await page.getByLabel(`Type ${sku} to confirm`).fill(sku);
  await page.getByRole('button', { name: 'Delete everything' }).click();
  await page.getByText('have been reset').waitFor();
  expect((await fetch(`${server.url}/api/v1/sales?sku=${sku}`)).status).toBe(404);
});

it('the server’s objection stands at its field', async () => {
  const sku = await createSale(server, { startsInMs: 60_000 });
  const page = await enterBench(await browser.page());
  await page.getByLabel('SKU').fill(sku);
  await page.getByLabel('Product name').fill('Twice');
  await page.getByRole('button', { name: 'Create product' }).click();
  await page.locator('.field-error, [role=alert] .notice').waitFor();
});

it('a running sale shows its figures and cannot be edited', async () => {
  const sku = await activeSale(server, { stock: 4 });
  const page = await enterBench(await browser.page());
  await page.getByRole('button', { name: sku }).click();
  await page.getByText('cannot be edited').waitFor();
  expect(await page.getByRole('button', { name: 'Save changes' }).count()).toBe(0);
});

it.runIf(canFail)('a server without a list is worked with by SKU', async () => {
  const sku = await createSale(server, { startsInMs: 60_000 });
  const page = await browser.page();
  await page.route('**/api/v1/products', (route) =>
    route.fulfill({ status: 404, json: { success: false, error: { code: 'NOT_FOUND', message: 'No such route.' } } }),
  );
  await enterBench(page);
  await page.getByLabel('Open by SKU').fill(sku);
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { name: 'Limited Edition Widget' }).waitFor();
});
