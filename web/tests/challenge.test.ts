// The challenge in the page, with a stand-in for each provider on an address of its own: its script, frame and verifier.
import { describe, expect, it, afterAll } from 'vitest';
import type { Page } from 'playwright-core';
import { createProvider } from '../mock/provider.mjs';
import { activeSale, buyAs, buyButton, createSale, nameField, notice, openSale, outcome, ownServer, saleState, buyElsewhere, someone, status, useBrowser, useServer } from './harness';

const browser = useBrowser();

/** A score in the words of a provider: hCaptcha's is a risk, Turnstile has none. */
const scored = (provider: string, score: number) => (provider === 'hcaptcha' ? 1 - score : provider === 'turnstile' ? undefined : score);

const widget = (page: Page) => page.frameLocator('.challenge iframe').getByLabel('I am a person');

describe.skipIf(!ownServer).each(['turnstile', 'hcaptcha', 'recaptcha'])('with %s', (name) => {
  const provider = createProvider({ secret: 'a-secret', interactiveSecret: 'another-secret' });
  const server = useServer(async () => {
    if (provider.url === '') await provider.listen();
    return {
      WEIR_SALE_CHALLENGE_PROVIDER: name,
      WEIR_SALE_CHALLENGE_SITE_KEY: 'the-site-key',
      WEIR_SALE_CHALLENGE_SECRET: 'a-secret',
      WEIR_SALE_CHALLENGE_INTERACTIVE_SITE_KEY: 'the-interactive-key',
      WEIR_SALE_CHALLENGE_INTERACTIVE_SECRET: 'another-secret',
      WEIR_SALE_CHALLENGE_VERIFY_URL: `${provider.url}/siteverify`,
      WEIR_SALE_CHALLENGE_SCRIPT_URL: `${provider.url}/${name}/api.js?render=explicit`,
    };
  });
  afterAll(() => provider.close());

  async function shopper(stock = 5, found: Partial<typeof provider> = {}): Promise<{ page: Page; sku: string }> {
    Object.assign(provider, { score: scored(name, 0.9), invisible: true, reachable: true, verified: [] }, found);
    const sku = await activeSale(server, { stock });
    return { sku, page: await openSale(await browser.page(), server, sku) };
  }

  it('a shopper above the bands buys and sees no challenge', async () => {
    const { page, sku } = await shopper();
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    expect(provider.verified).toEqual([{ kind: 'invisible', key: 'the-site-key' }]);
    expect((await status(server, sku)).stock).toBe(4);
  });

  it('a shopper whom the invisible challenge cannot judge solves the interactive one', async () => {
    const { page } = await shopper(5, { invisible: false });
    await buyAs(page, someone());
    await widget(page).click();
    await outcome(page, 'confirmed').waitFor();
    expect(provider.verified).toEqual([{ kind: 'interactive', key: 'the-interactive-key' }]);
  });

  it.skipIf(name === 'turnstile')('the band in the middle buys without a challenge', async () => {
    const { page } = await shopper(5, { score: scored(name, 0.5) });
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    expect(provider.verified.map(({ kind }) => kind)).toEqual(['invisible']);
  });

  it.skipIf(name === 'turnstile')('the lowest band is asked, and its order goes out once the challenge is solved', async () => {
    const { page, sku } = await shopper(5, { score: scored(name, 0.1) });
    await buyAs(page, someone());
    await notice(page, 'challenged').waitFor();
    expect(await buyButton(page).textContent()).toBe('Waiting for you…');
    expect((await status(server, sku)).stock).toBe(5);
    await widget(page).click();
    await outcome(page, 'confirmed').waitFor();
    expect(provider.verified.map(({ kind }) => kind)).toEqual(['invisible', 'interactive']);
    expect(await page.locator('.challenge iframe').count()).toBe(0);
  });

  it('without the script nothing is bought, and the next attempt loads it', async () => {
    const { page, sku } = await shopper(5, { reachable: false });
    await buyAs(page, someone());
    await notice(page, 'unproven').waitFor();
    expect((await status(server, sku)).stock).toBe(5);
    provider.reachable = true;
    await buyButton(page).click();
    await outcome(page, 'confirmed').waitFor();
  });

  it('an order can be cancelled while the challenge is shown, and made again', async () => {
    const { page } = await shopper(5, { invisible: false });
    await buyAs(page, someone());
    await widget(page).waitFor();
    await expect.poll(() => buyButton(page).textContent()).toBe('Waiting for you…');
    await page.getByRole('button', { name: 'Cancel the order' }).click();
    await expect.poll(() => buyButton(page).textContent()).toBe('Buy one');
    await buyButton(page).click();
    await widget(page).click();
    await outcome(page, 'confirmed').waitFor();
  });

  it('a challenge is taken away when the sale ends under it', async () => {
    const { page, sku } = await shopper(1, { invisible: false });
    await buyAs(page, someone());
    await widget(page).waitFor();
    provider.invisible = true;
    const other = await openSale(await browser.page(), server, sku);
    await buyAs(other, someone());
    await expect.poll(() => saleState(page)).toBe('Sold out');
    await expect.poll(() => page.locator('.challenge iframe').count()).toBe(0);
  });

  it('nothing is sold to those who bring no token, or one a second time', async () => {
    const { page, sku } = await shopper();
    const request = page.waitForRequest((request) => request.method() === 'POST');
    await buyAs(page, someone());
    await outcome(page, 'confirmed').waitFor();
    const again = async (body: object) => {
      const headers = { 'X-User-Id': someone(), 'Content-Type': 'application/json' };
      const response = await fetch(`${server.url}/api/v1/purchases`, { method: 'POST', headers, body: JSON.stringify(body) });
      return ((await response.json()) as { error: { code: string } }).error.code;
    };
    expect(await again({ sku, qty: 1 })).toBe('CHALLENGE_REQUIRED');
    expect(await again((await request).postDataJSON() as object)).toBe('CHALLENGE_REQUIRED');
    expect((await status(server, sku)).stock).toBe(4);
  });

  it('the policy is opened for the provider, and for nobody on the page of the operator', async () => {
    const policy = async (path: string) => (await fetch(`${server.url}${path}`)).headers.get('content-security-policy') ?? '';
    const shown = await policy('/sale/');
    for (const directive of ['script-src', 'frame-src', 'connect-src', 'style-src']) {
      expect(shown.split(';').find((part) => part.trim().startsWith(directive))).toContain(provider.url);
    }
    expect(await policy('/sale/admin.html')).not.toContain('http');
  });
});

describe.skipIf(!ownServer)('where tokens name buyers', () => {
  const server = useServer(async () => ({ WEIR_SALE_IDENTITY: 'token', WEIR_JWT_SECRET: SECRET }));

  it('the token of the address buys, and is not shown', async () => {
    const sku = await activeSale(server);
    const page = await browser.page();
    const user = someone();
    await page.goto(`${server.url}/sale/?sku=${sku}#token=${await sign(user)}`);
    await page.getByRole('meter').waitFor();
    expect(new URL(page.url()).hash).toBe('');
    expect(await page.getByTestId('buyer').textContent()).toBe(user);
    expect(await nameField(page).count()).toBe(0);
    await page.getByRole('button', { name: 'Buy one' }).click();
    await outcome(page, 'confirmed').waitFor();
    await page.reload();
    await outcome(page, 'confirmed').waitFor();
    expect((await status(server, sku)).stock).toBe(9);
  });

  it('nobody can buy without one', async () => {
    const sku = await createSale(server, { startsInMs: 60_000 });
    const page = await openSale(await browser.page(), server, sku);
    await page.getByText('sign in at the shop').waitFor();
    expect(await buyButton(page).count()).toBe(0);
    await expect(buyElsewhere(server, sku)).rejects.toThrow();
  });
});

const SECRET = 'a secret of these tests, of 32 bytes or more';

/** A token that is good for an hour. */
async function sign(sub: string): Promise<string> {
  const encode = (value: object) => Buffer.from(JSON.stringify(value)).toString('base64url');
  const unsigned = `${encode({ alg: 'HS256', typ: 'JWT' })}.${encode({ sub, exp: Math.floor(Date.now() / 1000) + 3600 })}`;
  const key = await crypto.subtle.importKey('raw', Buffer.from(SECRET), { name: 'HMAC', hash: 'SHA-256' }, false, ['sign']);
  const signature = await crypto.subtle.sign('HMAC', key, Buffer.from(unsigned));
  return `${unsigned}.${Buffer.from(signature).toString('base64url')}`;
}
