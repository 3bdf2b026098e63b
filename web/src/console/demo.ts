// A small load, so that a new server has something to show: ordinary calls of the API with the operator's own credentials, under
// names that begin with `demo-`.
import type { Api } from './api';
import { ApiFailure, part } from './api';

export interface Progress {
  calls: number;
  allowed: number;
  denied: number;
  failed: number;
  leftMs: number;
}

export const DEMO_MS = 30_000;
const STEP_MS = 250;

interface Demo {
  api: Api;
  onProgress(progress: Progress): void;
  signal: AbortSignal;
  random?: () => number;
}

/** Everything that the load spends from. Again does no harm: windows begin anew. */
async function prepare(api: Api): Promise<string> {
  const users = [
    ['demo-alice', 400],
    ['demo-bob', 60],
    ['demo-carol', 12],
  ] as const;
  for (const [userId, rateLimit] of users) await api.send('POST', '/api/config', { userId, rateLimit, timeWindow: 1 });
  await api.send('PUT', '/admin/policies/demo-login', { kind: 'sliding_window', limit: 20, window: 'PT30S' });
  await api.send('PUT', '/admin/policies/demo-search', { kind: 'token_bucket', capacity: 50, refill: 5, period: 'PT1S' });
  await api.send('POST', '/admin/rate-limit/config', { configName: 'demo-payments', maxPerWindow: 20, windowSize: 'PT4S' });
  const sku = `DEMO-${Date.now().toString(36).toUpperCase()}`;
  const opens = Date.now() + 3000;
  await api.send('POST', '/api/v1/products', {
    sku,
    productName: 'Demo widget',
    initialStock: 100,
    startTime: new Date(opens).toISOString(),
    endTime: new Date(opens + 120_000).toISOString(),
  });
  return sku;
}

export async function runDemo({ api, onProgress, signal, random = Math.random }: Demo): Promise<Progress> {
  const progress: Progress = { calls: 0, allowed: 0, denied: 0, failed: 0, leftMs: DEMO_MS };
  const sku = await prepare(api);
  const ends = Date.now() + DEMO_MS;
  const name = (kind: string, of: number) => `demo-${kind}-${Math.floor(random() * of) + 1}`;
  let made = 0;

  async function call(make: () => Promise<boolean>): Promise<void> {
    progress.calls += 1;
    try {
      progress[(await make()) ? 'allowed' : 'denied'] += 1;
    } catch (error) {
      const isDenial = error instanceof ApiFailure && (error.status === 429 || error.status === 409 || error.status === 410);
      progress[isDenial ? 'denied' : 'failed'] += 1;
    }
  }

  const send = async () => {
    const [userId] = [['demo-alice', 'demo-alice', 'demo-bob', 'demo-carol'][Math.floor(random() * 4)]];
    await api.send('POST', '/api/send', { userId, message: 'Your code is 4711' });
    return true;
  };
  const check = async (policy: string, key: string) =>
    (await api.send<{ allowed: boolean }>('POST', '/v1/check', { checks: [{ policy, key, cost: 1 }] })).allowed;
  const assign = async () => {
    made += 1;
    const eventId = `demo-${sku}-${made}`;
    await api.send('POST', '/api/v1/slots', { eventId, configName: 'demo-payments', requestedTime: new Date(Date.now() + 5000).toISOString() });
    return true;
  };
  const buy = async () => {
    const response = await api.raw('/api/v1/purchases', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'X-User-Id': name('buyer', 400) },
      body: JSON.stringify({ sku, qty: 1 }),
    });
    return response.ok && ((await response.json()) as { success: boolean }).success;
  };

  while (Date.now() < ends && !signal.aborted) {
    await Promise.all([
      call(send),
      call(send),
      call(() => check('demo-login', name('address', 6))),
      call(() => check('demo-search', name('shop', 3))),
      call(assign),
      call(assign),
      call(buy),
    ]);
    progress.leftMs = Math.max(0, ends - Date.now());
    onProgress({ ...progress });
    await new Promise((wait) => setTimeout(wait, STEP_MS));
  }
  return progress;
}

/** Removes what the demo has made, but for slots and purchases, which are its proof. */
export async function removeDemo(api: Api): Promise<void> {
  const gone = async (path: string) => {
    try {
      await api.send('DELETE', path);
    } catch (error) {
      if (!(error instanceof ApiFailure && error.status === 404)) throw error;
    }
  };
  for (const user of ['demo-alice', 'demo-bob', 'demo-carol']) await gone(`/api/config/${part(user)}`);
  for (const policy of ['demo-login', 'demo-search']) await gone(`/admin/policies/${part(policy)}`);
  await gone('/admin/rate-limit/config/demo-payments');
}
