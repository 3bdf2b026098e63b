// What goes wrong on the way: the page says what is certain and recovers by itself.
import { describe, expect, it } from 'vitest';
import {
  activeSale,
  buyAs,
  buyElsewhere,
  canFail,
  linkShown,
  nameField,
  notice,
  openSale,
  outcome,
  ownServer,
  saleState,
  someone,
  status,
  stockShown,
  useBrowser,
  useServer,
} from './harness';

const server = useServer();
const browser = useBrowser();

describe.runIf(ownServer)('the server is killed and started again', () => {
  it('in the middle of a sale: the page says so, resumes where it was and sells', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    await expect.poll(() => linkShown(page)).toBe('live');
    await buyElsewhere(server, sku);
    await expect.poll(() => stockShown(page)).toBe(4);
    await server.kill();
    await expect.poll(() => linkShown(page)).toBe('offline');
    expect(await saleState(page)).toBe('On sale now');
    expect(await stockShown(page)).toBe(4);
    await server.restart();
    await buyElsewhere(server, sku);
    await expect.poll(() => stockShown(page)).toBe(3);
    await expect.poll(() => linkShown(page)).toBe('live');
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(2);
  });

  it.runIf(canFail)('while an order is on its way and was taken: the page finds the purchase', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    await server.fault({ path: '/api/v1/purchases', method: 'POST', drop: true, late: true });
    await server.fault({ path: '/api/v1/purchases', method: 'GET', drop: true, times: 50 });
    await buyAs(page, someone());
    await expect.poll(async () => (await status(server, sku)).stock).toBe(4);
    expect(await page.locator('[data-outcome]').count()).toBe(0);
    await server.kill();
    await server.restart();
    await outcome(page, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(4);
  });
});

describe.runIf(canFail)('the event stream is cut', () => {
  it('and resumes with the id of the last event', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    await expect.poll(() => linkShown(page)).toBe('live');
    await buyElsewhere(server, sku);
    await expect.poll(() => stockShown(page)).toBe(4);
    const streams = async () => (await server.log()).filter((entry) => entry.path.includes(`events?sku=${sku}`));
    expect((await streams()).map((entry) => entry.lastEventId)).toEqual([null]);
    await server.cutStreams();
    await expect.poll(async () => (await streams()).length).toBe(2);
    expect(Number((await streams())[1]?.lastEventId)).toBeGreaterThan(0);
  });
});

describe('an order', () => {
  it('cut off by a reload is followed up: it was taken', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    let arrived = () => {};
    const taken = new Promise<void>((resolve) => (arrived = resolve));
    await page.route('**/api/v1/purchases', async (route) => {
      if (route.request().method() !== 'POST') return route.continue();
      await route.fetch();
      arrived(); // bought, but the page never hears of it
    });
    await buyAs(page, someone());
    await taken;
    await page.reload();
    await outcome(page, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(4);
  });

  it('cut off by a reload before it arrived is told apart, and can be made again', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    let stopped = () => {};
    const held = new Promise<void>((resolve) => (stopped = resolve));
    let posts = 0;
    await page.route('**/api/v1/purchases', (route) => {
      const first = route.request().method() === 'POST' && (posts += 1) === 1;
      return first ? stopped() : route.continue();
    });
    const buyer = someone();
    await buyAs(page, buyer);
    await held;
    await page.reload();
    await notice(page, 'checking').waitFor();
    await notice(page, 'lost').waitFor();
    expect(await nameField(page).inputValue()).toBe(buyer);
    await page.getByRole('button', { name: 'Buy one' }).click();
    await outcome(page, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(4);
  });

  it.runIf(canFail)('answered with 503 is checked, called unavailable, and can be made again', async () => {
    const sku = await activeSale(server);
    const page = await openSale(await browser.page(), server, sku);
    await server.fault({ path: '/api/v1/purchases', method: 'POST', status: 503, retryAfter: 1 });
    await buyAs(page, someone());
    await notice(page, 'unavailable').waitFor();
    await page.getByRole('button', { name: 'Buy one' }).click();
    await outcome(page, 'confirmed').waitFor();
  });

  it('made too soon after another is throttled: the button counts down and comes back', async () => {
    const sku = await activeSale(server);
    const page = await openSale(await browser.page(), server, sku);
    await page.route('**/api/v1/purchases', (route) =>
      route.fulfill({
        status: 429,
        headers: { 'Retry-After': '2' },
        json: { success: false, error: { code: 'RATE_LIMITED', message: 'Too many requests.', retryAfter: 2 } },
      }),
    );
    await buyAs(page, someone());
    await notice(page, 'throttled').waitFor();
    const button = page.getByRole('button', { name: /Try again in \d s/ });
    expect(await button.getAttribute('aria-disabled')).toBe('true');
    await page.unroute('**/api/v1/purchases');
    await page.getByRole('button', { name: 'Buy one' }).click();
    await outcome(page, 'confirmed').waitFor();
  });
});

describe('the device clock is wrong', () => {
  it.each([
    ['three hours behind', -3 * 3_600_000],
    ['two days ahead', 2 * 86_400_000],
  ])('%s: the countdown follows the server', async (_name, shift) => {
    const sku = await activeSale(server, { lastsMs: 600_000 });
    const page = await browser.page();
    await page.addInitScript((ms) => {
      const real = Date.now;
      Date.now = () => real() + ms;
    }, shift);
    await openSale(page, server, sku);
    const shown = Number(await page.locator('[data-seconds]').getAttribute('data-seconds'));
    expect(shown).toBeGreaterThan(590);
    expect(shown).toBeLessThanOrEqual(601);
  });
});

describe('there is no sale', () => {
  it('of that name: the page says so and keeps asking', async () => {
    const page = await browser.page();
    await page.goto(`${server.url}/sale/?sku=NOT-THERE`);
    await page.getByRole('heading', { name: 'No sale is planned' }).waitFor();
    expect(await linkShown(page)).toBe('polling');
  });
});
