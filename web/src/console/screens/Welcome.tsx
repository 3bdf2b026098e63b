// First steps: what to do on an empty server, with lines to copy, and a small load to look at.
import { useState } from 'react';
import { useStore } from '../../react';
import { ApiFailure } from '../api';
import { DEMO_MS, removeDemo, runDemo } from '../demo';
import { count, span } from '../format';
import { useSession } from '../hooks';
import { Act, Lines, Panel, Problem } from '../ui';

interface Step {
  title: string;
  about: string;
  lines(origin: string): string;
  next: [string, string];
}

const post = (origin: string, path: string, body: object, method = 'POST') => `curl -s -X ${method} ${origin}${path} -H "x-admin-key: $KEY" \\\n  -H 'content-type: application/json' -d '${JSON.stringify(body)}'`;

const STEPS: Step[] = [
  {
    title: 'Limit messages per user',
    about: 'quota: two messages a minute for alice; the third is refused with the time to wait.',
    lines: (origin) =>
      [post(origin, '/api/config', { userId: 'alice', rateLimit: 2, timeWindow: 1 }), `for n in 1 2 3; do\n  ${post(origin, '/api/send', { userId: 'alice', message: 'hello' }).replace('\n', '\n  ')}; echo\ndone`].join('\n'),
    next: ['#/key/alice', 'Look at alice'],
  },
  {
    title: 'Limit anything by a key',
    about: 'policies: five logins a minute from each address.',
    lines: (origin) =>
      [
        post(origin, '/admin/policies/login', { kind: 'sliding_window', limit: 5, window: 'PT1M' }, 'PUT'),
        post(origin, '/v1/check', { checks: [{ policy: 'login', key: '10.0.0.1' }], explain: true }),
      ].join('\n'),
    next: ['#/policies', 'Policies'],
  },
  {
    title: 'Spread work over time',
    about: 'slot: twenty payments in each window of four seconds; the rest go into later windows.',
    lines: (origin) =>
      [
        post(origin, '/admin/rate-limit/config', { configName: 'payments', maxPerWindow: 20, windowSize: 'PT4S' }),
        post(origin, '/api/v1/slots', { eventId: 'payment-1', configName: 'payments', requestedTime: '2026-06-01T12:00:00Z' }),
      ].join('\n'),
    next: ['#/slots/payments', 'Slots'],
  },
  {
    title: 'Call others once per key',
    about: 'request: accepted once per idempotency key, called until it works. The token names the tenant.',
    lines: (origin) =>
      `TOKEN=$(weir token --sub shop --tenant acme --scope requests:create,requests:read)\ncurl -s ${origin}/v1/requests -H "authorization: Bearer $TOKEN" \\\n  -H 'content-type: application/json' -d '${JSON.stringify({ idempotencyKey: 'order-1', requestType: 'payment', payload: { amount: 12 } })}'`,
    next: ['#/requests?view=all', 'Requests'],
  },
  {
    title: 'Sell what there is, once',
    about: 'sale: a hundred units, two thousand simulated buyers.',
    lines: () => 'weir sale demo',
    next: ['#/sale', 'Sale'],
  },
];

export function WelcomeScreen() {
  const origin = window.location.origin;
  return (
    <>
      <h1>First steps</h1>
      <Demo />
      <Panel title="By hand" aside={<a href="/docs">Every route, with a form to try it</a>}>
        <p className="note">Each line is a call of the API. First the key, where the server’s data directory is:</p>
        <Lines text="KEY=$(cat data/admin.key)" label="the line that reads the key" />
        <ol className="steps">
          {STEPS.map((step) => (
            <li key={step.title}>
              <h3>{step.title}</h3>
              <p>{step.about}</p>
              <Lines text={step.lines(origin)} label={`the lines: ${step.title}`} />
              <a href={step.next[0]}>{step.next[1]}</a>
            </li>
          ))}
        </ol>
      </Panel>
    </>
  );
}

function Demo() {
  const { api, say, demo } = useSession();
  const { progress, running } = useStore(demo);
  const [failure, setFailure] = useState<ApiFailure | null>(null);

  async function guard(work: () => Promise<void>): Promise<void> {
    setFailure(null);
    try {
      await work();
    } catch (error) {
      setFailure(error instanceof ApiFailure ? error : new ApiFailure(0, 'UNKNOWN', 'That did not work.'));
    }
  }

  const start = () =>
    guard(async () => {
      const controller = new AbortController();
      demo.set({ progress: null, running: controller });
      try {
        await runDemo({ api, signal: controller.signal, onProgress: (progress) => demo.set({ progress, running: controller }) });
        say('The demo load is over.');
      } finally {
        demo.set({ ...demo.get(), running: null });
      }
    });

  return (
    <Panel title="See it work">
      <p className="note">
        A small load for {span(DEMO_MS)}: about thirty calls a second from this page, with your credentials. It makes three users, two policies, a slot config and a sale, all named <code>demo-…</code>, and nothing else changes.
      </p>
      <p className="actions">
        {running ? (
          <button type="button" className="button" onClick={() => running.abort()}>
            Stop
          </button>
        ) : (
          <Act tone="primary" onClick={() => void start()}>
            Run the demo load
          </Act>
        )}
        <Act onClick={() => void guard(async () => (await removeDemo(api), say('The demo’s users, policies and config are gone.')))} disabled={running !== null}>
          Remove what it made
        </Act>
        <a href="#/now">Watch it under Now</a>
      </p>
      <div role="status">
        {progress && (
          <p data-testid="demo">
            {running ? `${span(progress.leftMs)} left: ` : 'Done: '}
            {count(progress.calls)} calls, {count(progress.allowed)} allowed, {count(progress.denied)} denied, {count(progress.failed)} failed.
          </p>
        )}
      </div>
      {failure && <Problem failure={failure} />}
    </Panel>
  );
}
