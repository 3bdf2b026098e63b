// Several browsers, one unit.
import { expect, it } from 'vitest';
import { activeSale, createSale, buyButton, nameField, openSale, outcome, someone, status, useBrowser, useServer } from './harness';

const server = useServer();
const browser = useBrowser();

it('two browsers race for the last unit: one gets it, the other is told that it is sold out', async () => {
  const sku = await activeSale(server, { stock: 1 });
  const pages = await Promise.all([0, 1].map(async () => openSale(await browser.page(), server, sku)));
  for (const page of pages) await nameField(page).fill(someone());
  // Both orders are held until both have been sent, so neither browser can learn of the other's purchase first.
  let waiting = 0;
  let release = () => {};
  const both = new Promise<void>((resolve) => (release = resolve));
  for (const page of pages) {
    await page.route('**/api/v1/purchases', async (route) => {
      if (route.request().method() === 'POST' && (waiting += 1) === 2) release();
      await both;
      await route.continue();
    });
  }
  await Promise.all(pages.map((page) => page.getByRole('button', { name: 'Buy one' }).click()));
  await Promise.all(pages.map((page) => page.locator('[data-outcome]').waitFor()));
  const kinds = await Promise.all(pages.map((page) => page.locator('[data-outcome]').getAttribute('data-outcome')));
  expect(kinds.sort()).toEqual(['confirmed', 'soldOut']);
  expect(await status(server, sku)).toMatchObject({ state: 'ENDED', stock: 0 });
});

it('an order in the opening rush waits for a random part of 500 ms, a later one does not', async () => {
  const sku = await createSale(server, { startsInMs: 4000 });
  const page = await browser.page();
  await page.addInitScript(() => {
    Math.random = () => 0.9;
    const times = ((window as unknown as { times: number[] }).times = []) as number[];
    addEventListener('click', () => times.push(performance.now()), true);
    const real = fetch;
    window.fetch = (url, init) => {
      if (init?.method === 'POST') times.push(performance.now());
      return real(url, init);
    };
  });
  const delay = async () => {
    await outcome(page, 'confirmed').waitFor();
    const [clicked = 0, sent = 0] = await page.evaluate(() => (window as unknown as { times: number[] }).times);
    return sent - clicked;
  };
  await openSale(page, server, sku);
  await nameField(page).fill(someone());
  await buyButton(page).click(); // waits for the button to be enabled, and is as fast as any shopper
  expect(await delay()).toBeGreaterThanOrEqual(449);

  await openSale(page, server, await activeSale(server, { startsInMs: 300 }));
  await nameField(page).fill(someone());
  await expect.poll(async () => Number(await page.locator('[data-seconds]').getAttribute('data-seconds'))).toBeLessThan(117);
  await buyButton(page).click();
  expect(await delay()).toBeLessThan(400);
});
