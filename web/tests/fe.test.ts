// The frontend requirements of the sale, FE-1 to FE-7, each by name.
import { describe, expect, it } from 'vitest';
import {
  activeSale,
  buyAs,
  buyButton,
  buyElsewhere,
  createSale,
  linkShown,
  nameField,
  openSale,
  outcome,
  saleState,
  someone,
  status,
  stockShown,
  useBrowser,
  useServer,
} from './harness';

const server = useServer();
const browser = useBrowser();

describe('FE-1 the page shows the sale state', () => {
  it('from upcoming through active to ended by time, without a reload', async () => {
    const sku = await createSale(server, { startsInMs: 4000, lastsMs: 2500 });
    const page = await openSale(await browser.page(), server, sku);
    expect(await saleState(page)).toBe('Opens soon');
    expect(await page.getByRole('timer').getAttribute('aria-label')).toMatch(/^Opens in \d second/);
    await expect.poll(() => saleState(page)).toBe('On sale now');
    expect(await page.getByRole('timer').getAttribute('aria-label')).toMatch(/^Closes in/);
    await expect.poll(() => saleState(page)).toBe('Sale ended');
    expect(await page.getByRole('timer').count()).toBe(0);
    expect(await page.title()).toContain('Sale ended');
  });

  it('and sold out when the last unit goes', async () => {
    const sku = await activeSale(server, { stock: 1 });
    const page = await openSale(await browser.page(), server, sku);
    await buyElsewhere(server, sku);
    await expect.poll(() => saleState(page)).toBe('Sold out');
  });
});

describe('FE-2 the stock shown is the server’s', () => {
  it('after each purchase', async () => {
    const sku = await activeSale(server, { stock: 5 });
    const page = await openSale(await browser.page(), server, sku);
    expect(await stockShown(page)).toBe(5);
    for (const left of [4, 3, 2, 1, 0]) {
      await buyElsewhere(server, sku);
      await expect.poll(() => stockShown(page)).toBe(left);
      expect((await status(server, sku)).stock).toBe(left);
    }
    expect(await page.locator('.gauge > .face .figure').textContent()).toBe('0left of 5');
  });
});

describe('FE-3 the button is off unless the sale is active', () => {
  it('before, during and after', async () => {
    const sku = await createSale(server, { startsInMs: 4000, lastsMs: 2500 });
    const page = await openSale(await browser.page(), server, sku);
    await nameField(page).fill(someone());
    expect(await buyButton(page).isDisabled()).toBe(true);
    await nameField(page).press('Enter');
    await expect.poll(() => buyButton(page).isEnabled()).toBe(true);
    await expect.poll(() => buyButton(page).isDisabled()).toBe(true);
    expect(await buyButton(page).textContent()).toBe('Sale ended');
    expect((await status(server, sku)).stock).toBe(10);
  });
});

describe('FE-4 the outcomes look different', () => {
  it('confirmed, with the purchase number', async () => {
    const sku = await activeSale(server);
    const page = await openSale(await browser.page(), server, sku);
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    expect(await page.getByTestId('purchase-no').textContent()).toMatch(/^PUR-\d{8}-\d{4,}$/);
    expect(await page.getByRole('heading', { name: 'You got one' }).evaluate((el) => el === document.activeElement)).toBe(true);
  });

  it('already purchased, with the earlier number', async () => {
    const sku = await activeSale(server);
    const buyer = someone();
    const earlier = await buyElsewhere(server, sku, buyer);
    const boughtAt = Date.now();
    const page = await openSale(await browser.page(), server, sku);
    // Longer ago than a page allows for a clock that is off: what is younger counts as bought by this order.
    await expect.poll(() => Date.now() - boughtAt).toBeGreaterThan(1500);
    await buyAs(page, buyer);
    await outcome(page, 'already').waitFor();
    expect(await page.getByTestId('purchase-no').textContent()).toBe(earlier);
  });

  it('sold out, when the last unit went while the order was on its way', async () => {
    const sku = await activeSale(server, { stock: 1 });
    const page = await openSale(await browser.page(), server, sku);
    await page.route('**/api/v1/purchases', async (route) => {
      await buyElsewhere(server, sku);
      await route.continue();
    });
    await buyAs(page, someone());
    await outcome(page, 'soldOut').waitFor();
    expect(await page.getByRole('heading', { name: 'Sold out' }).isVisible()).toBe(true);
  });

  it('not active, when the order arrived after the close', async () => {
    const sku = await activeSale(server, { lastsMs: 4500 });
    const page = await openSale(await browser.page(), server, sku);
    await page.route('**/api/v1/purchases', async (route) => {
      await expect.poll(async () => (await status(server, sku)).state).toBe('ENDED');
      await route.continue();
    });
    await buyAs(page, someone());
    await outcome(page, 'notActive').waitFor();
    expect(await page.getByRole('heading', { name: 'The sale is over' }).isVisible()).toBe(true);
  });
});

describe('FE-5 wrong input is not sent', () => {
  it('nothing, spaces, too much, and what a header cannot hold', async () => {
    const sku = await activeSale(server);
    const page = await openSale(await browser.page(), server, sku);
    let sent = 0;
    page.on('request', (request) => void (sent += request.method() === 'POST' ? 1 : 0));
    const field = nameField(page);
    const cases: [string, RegExp][] = [
      ['', /Enter your e-mail/],
      ['   ', /Enter your e-mail/],
      ['x'.repeat(256), /at most 255/],
      ['zoë@example.com', /plain letters/],
    ];
    for (const [input, message] of cases) {
      await buyAs(page, input);
      expect(await page.locator('.field-error').textContent()).toMatch(message);
      expect(await field.getAttribute('aria-invalid')).toBe('true');
      expect(await field.evaluate((el) => el === document.activeElement)).toBe(true);
      const described = (await field.getAttribute('aria-describedby')) ?? '';
      expect(described.split(' ')).toContain(await page.locator('.field-error').getAttribute('id'));
    }
    expect(sent).toBe(0);
  });
});

describe('FE-6 after a purchase there is no second one', () => {
  it('no button is left, also after a reload and in a second tab', async () => {
    const sku = await activeSale(server);
    const context = await browser.context();
    const page = await openSale(await context.newPage(), server, sku);
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    const number = await page.getByTestId('purchase-no').textContent();
    expect(await buyButton(page).count()).toBe(0);
    await page.reload();
    await outcome(page, 'confirmed').waitFor();
    expect(await page.getByTestId('purchase-no').textContent()).toBe(number);
    expect(await buyButton(page).count()).toBe(0);
    const second = await openSale(await context.newPage(), server, sku);
    await outcome(second, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(9);
  });

  it('a tab that was open already learns of it', async () => {
    const sku = await activeSale(server);
    const context = await browser.context();
    const [first, second] = [await openSale(await context.newPage(), server, sku), await openSale(await context.newPage(), server, sku)];
    await buyAs(first, someone());
    await outcome(second, 'confirmed').waitFor();
  });

  it('pressing twice sends one order', async () => {
    const sku = await activeSale(server);
    const page = await openSale(await browser.page(), server, sku);
    let sent = 0;
    page.on('request', (request) => void (sent += request.method() === 'POST' ? 1 : 0));
    await nameField(page).fill(someone());
    await page.getByRole('button', { name: 'Buy one' }).dblclick();
    await outcome(page, 'confirmed').waitFor();
    expect(sent).toBe(1);
  });
});

describe('FE-7 the page updates by itself', () => {
  it('through the event stream', async () => {
    const sku = await activeSale(server, { stock: 3 });
    const page = await openSale(await browser.page(), server, sku);
    await expect.poll(() => linkShown(page)).toBe('live');
    let asked = 0;
    page.on('request', (request) => void (asked += request.url().includes('/api/v1/sales?') ? 1 : 0));
    await buyElsewhere(server, sku);
    await expect.poll(() => stockShown(page)).toBe(2);
    expect(asked).toBe(0);
  });

  it('by polling where the stream is blocked', async () => {
    const sku = await activeSale(server, { stock: 3 });
    const page = await browser.page();
    await page.route('**/api/v1/sales/events*', (route) => route.abort());
    await openSale(page, server, sku);
    await expect.poll(() => linkShown(page)).toBe('polling');
    await buyElsewhere(server, sku);
    await expect.poll(() => stockShown(page)).toBe(2);
  });
});
