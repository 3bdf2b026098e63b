// The operators' console on a real server: sign-in, the three questions, every screen for everybody, and actions that say first how
// many they affect. Without WEIR_BINARY there is no such server, and these tests are left out.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import type { AxeResults } from 'axe-core';
import type { Locator, Page } from 'playwright-core';
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest';
import { fill, startWorld, submit, user } from '../tools/world.mjs';
import type { World } from '../tools/world.mjs';
import { useBrowser } from './harness';

const BINARY = process.env['WEIR_BINARY'];
const axeSource = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const RULES = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
const SCREENS = ['now', 'key', 'key/alice%40example.com', 'requests', 'requests?view=all', 'dead', 'slots', 'sale', 'policies', 'audit', 'start'];

async function violations(page: Page): Promise<string[]> {
  await page.evaluate(axeSource);
  const results = await page.evaluate((runOnly) => (window as unknown as { axe: { run(of: Document, options: object): Promise<AxeResults> } }).axe.run(document, { runOnly }), RULES);
  return results.violations.map((found) => `${found.id}: ${found.nodes.map((node) => node.html.slice(0, 160)).join(' | ')}`);
}

/** Signs in, and counts what is clicked or entered from then on. */
async function signIn(page: Page, world: World, credential = world.adminKey): Promise<{ clicks: number; click(target: Locator): Promise<void>; enter(target: Locator, text: string): Promise<void> }> {
  await page.goto(`${world.url}/`);
  await page.getByLabel('Admin key or token').fill(credential);
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.getByRole('navigation', { name: 'Screens' }).waitFor();
  const counter = {
    clicks: 0,
    async click(target: Locator) {
      counter.clicks += 1;
      await target.click();
    },
    async enter(target: Locator, text: string) {
      counter.clicks += 1;
      await target.fill(text);
      await target.press('Enter');
    },
  };
  return counter;
}

async function open(page: Page, screen: string): Promise<void> {
  await page.evaluate((hash) => void (window.location.hash = hash), `#/${screen}`);
  await page.locator(`[data-screen="${screen.split(/[/?]/)[0]}"]`).waitFor();
  // Every panel has what it loads.
  await expect.poll(() => page.locator('.loading').count()).toBe(0);
}

describe.runIf(BINARY !== undefined)('the console', () => {
  const browser = useBrowser();
  let world: World;

  beforeAll(async () => {
    world = await startWorld(BINARY ?? '');
    await fill(world);
    // The requests whose downstream always fails have died.
    await vi.waitFor(async () => expect((await world.call('/admin/dlq/groups')).body.scanned).toBeGreaterThan(0), { timeout: 120_000, interval: 100 });
  }, 240_000);
  afterAll(() => world?.stop());

  it('asks for a key, refuses a wrong one, and stores none', async () => {
    const page = await browser.page();
    await page.goto(`${world.url}/`);
    await page.getByRole('button', { name: 'Sign in' }).click();
    await page.getByText('Enter the admin key or a token.').waitFor();
    await page.getByLabel('Admin key or token').fill('wrong');
    await page.getByRole('button', { name: 'Sign in' }).click();
    await page.getByText('The server does not take this key or token.').waitFor();
    await page.getByLabel('Admin key or token').fill(world.token({ scope: 'quota:send' }));
    await page.getByRole('button', { name: 'Sign in' }).click();
    await page.getByText('neither the scope admin nor admin:read').waitFor();
    await signIn(page, world);
    const stored = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, window.location.href]));
    expect(stored).not.toContain(world.adminKey);
    await page.reload();
    await page.getByLabel('Admin key or token').waitFor();
  });

  describe('answers within three clicks from sign-in', () => {
    it('why a user was denied', async () => {
      const page = await browser.page();
      const counter = await signIn(page, world);
      await counter.enter(page.getByLabel('Look up a user or key'), 'alice@example.com');
      await page.getByText('Denied now by message quota').waitFor();
      await expect.poll(() => page.getByTestId('last-denial').textContent()).toMatch(/Last denial.*message quota decided, all 50 were used.*3 denials/);
      expect(counter.clicks).toBeLessThanOrEqual(3);
    });

    it('what is stuck, and why', async () => {
      const page = await browser.page();
      const counter = await signIn(page, world);
      await counter.click(page.getByRole('link', { name: 'Requests', exact: true }).first());
      const rows = page.getByRole('group', { name: 'Requests that have not ended' }).locator('tbody tr');
      await rows.first().waitFor();
      await expect.poll(() => rows.allTextContents().then((all) => all.join())).toMatch(/answered 202 to attempt 1; its callback is awaited until/);
      expect(counter.clicks).toBeLessThanOrEqual(3);
    });

    it('who is near a limit', async () => {
      const page = await browser.page();
      const counter = await signIn(page, world);
      await open(page, 'now');
      const rows = page.getByRole('region', { name: 'Who is near a limit' }).locator('tbody tr');
      await expect.poll(() => rows.allTextContents().then((all) => all.join())).toMatch(/mallory@example\.com.*policy password-reset/);
      await counter.click(page.getByRole('link', { name: 'Key', exact: true }));
      await page.getByRole('group', { name: 'Keys near a limit' }).getByText('newsletter-eu').waitFor();
      expect(counter.clicks).toBeLessThanOrEqual(3);
    });
  });

  it('a read-only token sees everything and can change nothing', async () => {
    const page = await browser.page();
    await signIn(page, world, world.token({ scope: 'admin:read' }));
    await page.getByText('read only').waitFor();
    const refused: string[] = [];
    page.on('response', (response) => void (response.status() === 403 && refused.push(response.url())));
    for (const screen of SCREENS) {
      await open(page, screen);
      expect(await page.locator('.content [role=alert]').count(), screen).toBe(0);
      for (const name of [/^Replay/, /^Reset$/, /^Change/, /^New policy$/, /^Run the demo/, /^Cancel all/, /^Switch/]) {
        for (const button of await page.getByRole('button', { name }).all()) expect(await button.isDisabled(), `${screen} ${String(name)}`).toBe(true);
      }
    }
    expect(refused).toEqual([]);
  });

  it('shows decisions as they are made, and says when it is disconnected', async () => {
    const other = await startWorld(BINARY ?? '');
    try {
      const page = await browser.page();
      await signIn(page, other);
      await open(page, 'now');
      await expect.poll(() => page.locator('[data-link]').getAttribute('data-link')).toBe('live');
      await user(other, 'eve', 2, 4);
      await page.getByRole('region', { name: 'Who is near a limit' }).getByText('eve').waitFor();
      await other.kill();
      await expect.poll(() => page.locator('[data-link]').getAttribute('data-link')).toBe('lost');
      await page.getByText('Not connected.').waitFor();
      await other.restart();
      await expect.poll(() => page.locator('[data-link]').getAttribute('data-link')).toBe('live');
    } finally {
      await other.stop();
    }
  });

  it('leads to the first steps on an empty server, and runs a demo load there', async () => {
    const empty = await startWorld(BINARY ?? '');
    try {
      const page = await browser.page();
      await signIn(page, empty);
      await page.getByRole('heading', { name: 'First steps' }).waitFor();
      await page.getByText('curl -s -X POST').first().waitFor();
      await page.getByRole('button', { name: 'Run the demo load' }).click();
      await expect.poll(() => page.getByTestId('demo').textContent()).toMatch(/[1-9]\d* allowed, [1-9]\d* denied, 0 failed/);
      await open(page, 'now');
      await page.getByRole('region', { name: 'Who is near a limit' }).getByText('demo-carol').waitFor();
      await open(page, 'start');
      await page.getByRole('button', { name: 'Stop' }).click();
      await page.getByText('The demo load is over.').waitFor();
      await page.getByRole('button', { name: 'Remove what it made' }).click();
      await page.getByText('are gone').waitFor();
      expect((await empty.call('/admin/policies')).body.items).toEqual([]);
    } finally {
      await empty.stop();
    }
  });

  it('actions on many say first how many they affect', async () => {
    for (let n = 0; n < 3; n += 1) await submit(world, 'umbrella', 'export', `umbrella-${n}`);
    const page = await browser.page();
    await signIn(page, world);
    await open(page, 'requests?view=unfinished&tenant=umbrella');
    await page.getByRole('button', { name: 'Cancel all that match' }).click();
    await expect.poll(() => page.getByTestId('affected').textContent()).toContain('3 requests match now');
    await page.getByRole('button', { name: 'Cancel 3 requests' }).click();
    await page.getByText('3 requests cancelled.').waitFor();
    await page.getByText('Nothing that matches is unfinished.').waitFor();

    await open(page, 'dead');
    const before = (await world.call('/admin/dlq/groups?topic=requests&type=kyc')).body.scanned as number;
    await page.getByRole('row', { name: /kyc/ }).getByRole('button', { name: 'Replay group' }).click();
    await expect.poll(() => page.getByTestId('affected').textContent()).toMatch(new RegExp(`^${before} dead letters? go`));
    await page.getByRole('button', { name: 'Leave it' }).click();
    expect((await world.call('/admin/dlq/groups?topic=requests&type=kyc')).body.scanned).toBe(before);
  });

  it('a request shows its way, and its trace', async () => {
    const id = (await world.call('/admin/requests?status=FAILED_PERMANENT&limit=1')).body.items[0].requestId as string;
    const page = await browser.page();
    await signIn(page, world);
    await open(page, `requests/${id}`);
    await expect.poll(() => page.locator('.timeline li').allTextContents().then((all) => all.join())).toMatch(/Accepted.*Rejected: not tried again/);
    await page.getByText(/trace [0-9a-f]{32}/).waitFor();
  });

  it('a changed policy shows who would be denied before it is saved', async () => {
    const page = await browser.page();
    await signIn(page, world);
    await open(page, 'policies');
    await page.getByRole('link', { name: 'login-per-address' }).click();
    const preview = page.getByRole('region', { name: 'Who would be denied now' });
    await preview.getByText('1 key would be denied now').waitFor();
    await page.getByLabel('Limit', { exact: true }).fill('15');
    await preview.getByText('2 keys would be denied now').waitFor();
    await page.getByRole('button', { name: 'Save the policy' }).click();
    await page.getByText('login-per-address was saved.').waitFor();
    expect((await world.call('/admin/policies/login-per-address')).body.limit).toBe(15);
  });

  it('a quota is changed and a key reset where they are looked at', async () => {
    await user(world, 'frank', 2, 3);
    const page = await browser.page();
    await signIn(page, world);
    await open(page, 'key/frank');
    await page.getByText('Denied now by message quota').waitFor();
    await page.getByRole('button', { name: 'Change quota' }).click();
    await page.getByLabel('Messages').fill('9');
    await page.getByRole('button', { name: 'Save', exact: true }).click();
    await page.getByText('Would be allowed now').waitFor();
    expect((await world.call('/api/config/frank')).body).toMatchObject({ rateLimit: 9, currentCount: 2 });
    await open(page, 'key/mallory%40example.com');
    await page.getByRole('row', { name: /password-reset/ }).first().getByRole('button', { name: 'Reset' }).click();
    await page.getByRole('button', { name: 'Forget what was spent' }).click();
    await page.getByText('Would be allowed now').waitFor();
  });

  it('works with the keyboard alone', async () => {
    const page = await browser.page();
    await signIn(page, world);
    await open(page, 'slots');
    await page.keyboard.press('/');
    await page.keyboard.type('bob@example.com');
    await page.keyboard.press('Enter');
    await page.getByRole('heading', { name: 'bob@example.com' }).waitFor();
    await open(page, 'slots');
    const cells = page.locator('.heat-cell[data-at]');
    await cells.first().waitFor();
    await page.locator('.heat-cell[tabindex="0"]').focus();
    await page.keyboard.press('ArrowRight');
    await page.keyboard.press('ArrowUp');
    expect(await page.evaluate(() => document.activeElement?.getAttribute('data-at'))).toBe('61');
    await page.keyboard.press('Enter');
    await page.getByRole('heading', { name: /^Window of/ }).waitFor();
    expect(await page.locator('.heat-cell[tabindex="0"]').count()).toBe(1);
  });

  it('asks nobody but its server', async () => {
    const page = await browser.page();
    const hosts = new Set<string>();
    page.on('request', (request) => void hosts.add(new URL(request.url()).origin));
    await signIn(page, world);
    for (const screen of SCREENS) await open(page, screen);
    expect([...hosts]).toEqual([new URL(world.url).origin]);
  });

  describe.each(['light', 'dark'] as const)('in %s', (colorScheme) => {
    it('axe finds nothing on any screen', async () => {
      const page = await browser.page({ colorScheme, reducedMotion: 'reduce' });
      await page.goto(`${world.url}/`);
      expect(await violations(page)).toEqual([]);
      await signIn(page, world);
      for (const screen of SCREENS) {
        await open(page, screen);
        expect(await violations(page), screen).toEqual([]);
      }
      await open(page, 'policies/login-per-address');
      await page.getByRole('dialog').waitFor();
      expect(await violations(page), 'a dialog').toEqual([]);
    });
  });

  it('nothing scrolls sideways, from a small phone to a desktop', async () => {
    const page = await browser.page();
    await signIn(page, world);
    for (const width of [340, 768, 1280]) {
      await page.setViewportSize({ width, height: 800 });
      for (const screen of SCREENS) {
        await open(page, screen);
        expect(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth), `${screen} at ${width}`).toBeLessThanOrEqual(0);
      }
    }
  });
});
