// Policies and plans: what limits there are, and who would be denied if one were changed.
import { useState } from 'react';
import type { NearLimit, Page, Policy, Subscription, Tier } from '../api';
import { part, withQuery } from '../api';
import { count, isoSpan, plural, time } from '../format';
import { go, to, usePlace, useResource, useSession } from '../hooks';
import { Act, Choice, Confirm, Empty, Field, Loaded, Panel, Scroll, Tag, Usage } from '../ui';

export function PoliciesScreen() {
  const { name } = usePlace();
  return (
    <>
      <h1>Policies and plans</h1>
      <PolicyList open={name} />
      <Tiers />
      <Subscriptions />
    </>
  );
}

/** The largest amount that a key may have, in every kind of policy. */
export function amount(policy: Policy): number {
  return policy.limit ?? policy.capacity ?? 0;
}

export function policyWords(policy: Policy): string {
  switch (policy.kind) {
    case 'fixed_window':
      return `${count(policy.limit ?? 0)} in each window of ${isoSpan(policy.window ?? '')}`;
    case 'sliding_window':
      return `${count(policy.limit ?? 0)} in any ${isoSpan(policy.window ?? '')}`;
    case 'token_bucket':
      return `${count(policy.capacity ?? 0)} at once, ${count(policy.refill ?? 0)} more every ${isoSpan(policy.period ?? '')}`;
    case 'concurrency':
      return `${count(policy.limit ?? 0)} at the same time, each for ${isoSpan(policy.ttl ?? '')} at most`;
  }
}

function PolicyList({ open }: { open: string | null }) {
  const { api } = useSession();
  const [isNew, setNew] = useState(false);
  const policies = useResource('policies', () => api.get<Page<Policy>>('/admin/policies?limit=1000'), 10_000);
  const edited = policies.data?.items.find((policy) => policy.name === open) ?? null;
  const close = () => {
    setNew(false);
    go(to('policies'));
    policies.reload();
  };
  return (
    <Panel title="Policies" aside={<Act onClick={() => setNew(true)}>New policy</Act>}>
      <Loaded resource={policies} what="policies">
        {({ items }) =>
          items.length === 0 ? (
            <Empty title="There is no policy yet.">
              <p>A policy limits any key that callers name: an address, a user, an API key. Callers ask with POST /v1/check.</p>
            </Empty>
          ) : (
            <Scroll label="Policies">
              <table className="grid">
                <thead>
                  <tr>
                    <th scope="col">Policy</th>
                    <th scope="col">Allows each key</th>
                    <th scope="col">Does</th>
                    <th scope="col">When its store is away</th>
                    <th scope="col">Envoy</th>
                  </tr>
                </thead>
                <tbody>
                  {items.map((policy) => (
                    <tr key={policy.name}>
                      <th scope="row">
                        <a href={to('policies', policy.name)}>{policy.name}</a>
                      </th>
                      <td>{policyWords(policy)}</td>
                      <td>{policy.shadow ? <Tag>only observes</Tag> : <Tag tone="info">denies</Tag>}</td>
                      <td>{policy.onOutage}</td>
                      <td>{policy.match ? policy.match.domain : '–'}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </Scroll>
          )
        }
      </Loaded>
      {(isNew || edited) && <EditPolicy key={edited?.name ?? ''} policy={edited} onClose={close} />}
    </Panel>
  );
}

const KINDS = [
  ['fixed_window', 'Fixed window'],
  ['sliding_window', 'Sliding window'],
  ['token_bucket', 'Token bucket'],
  ['concurrency', 'Concurrency'],
] as const;

function EditPolicy({ policy, onClose }: { policy: Policy | null; onClose(): void }) {
  const { api, readOnly } = useSession();
  const [name, setName] = useState(policy?.name ?? '');
  const [kind, setKind] = useState<Policy['kind']>(policy?.kind ?? 'fixed_window');
  const [limit, setLimit] = useState(String(policy ? amount(policy) : 10));
  const [refill, setRefill] = useState(String(policy?.refill ?? 10));
  const [window, setWindow] = useState(policy?.window ?? policy?.period ?? policy?.ttl ?? 'PT1M');
  const [shadow, setShadow] = useState(policy?.shadow ?? false);
  const [onOutage, setOnOutage] = useState(policy?.onOutage ?? 'local');
  const [deleting, setDeleting] = useState(false);
  const common = { shadow, onOutage, ...(policy?.match && kind !== 'concurrency' ? { match: policy.match } : {}) };
  const body =
    kind === 'token_bucket'
      ? { kind, capacity: Number(limit), refill: Number(refill), period: window, ...common }
      : kind === 'concurrency'
        ? { kind, limit: Number(limit), ttl: window, ...common }
        : { kind, limit: Number(limit), window, ...common };
  if (deleting && policy) {
    return (
      <Confirm
        title={`Delete ${policy.name}?`}
        action="Delete the policy"
        danger
        onClose={onClose}
        run={async () => {
          await api.send('DELETE', `/admin/policies/${part(policy.name)}`);
          return `${policy.name} was deleted.`;
        }}
      >
        <p>Checks against it are then answered with 404, and what keys have spent is forgotten.</p>
      </Confirm>
    );
  }
  return (
    <Confirm
      title={policy ? `Policy ${policy.name}` : 'New policy'}
      action="Save the policy"
      disabled={readOnly}
      onClose={onClose}
      run={async () => {
        await api.send('PUT', `/admin/policies/${part(name)}`, body);
        return `${name} was saved.`;
      }}
    >
      {policy === null && <Field label="Name" value={name} onChange={setName} required autoFocus />}
      <Choice label="Kind" value={kind} onChange={setKind} options={KINDS} />
      <div className="fields">
        <Field label={kind === 'token_bucket' ? 'Capacity' : 'Limit'} type="number" value={limit} onChange={setLimit} required />
        {kind === 'token_bucket' && <Field label="Refill" type="number" value={refill} onChange={setRefill} required />}
        <Field label={kind === 'token_bucket' ? 'Period' : kind === 'concurrency' ? 'Ends by itself after' : 'Window'} value={window} onChange={setWindow} hint="ISO 8601, such as PT1M" required />
        <Field label="When its store is away" value={onOutage} onChange={setOnOutage} options={['local', 'open', 'closed']} />
      </div>
      <label className="check">
        <input type="checkbox" checked={shadow} onChange={(event) => setShadow(event.target.checked)} /> Only observe, deny nothing
      </label>
      {policy && kind !== 'concurrency' && <Preview policy={policy} limit={Number(limit)} shadow={shadow} />}
      {policy && !readOnly && (
        <button type="button" className="text-button danger" onClick={() => setDeleting(true)}>
          Delete this policy
        </button>
      )}
    </Confirm>
  );
}

/** Those who would have nothing left under the new limit, and those who have under the present one. */
export function deniedBy(keys: NearLimit[], limit: number): { now: NearLimit[]; then: NearLimit[] } {
  const used = (near: NearLimit) => near.limit - near.remaining;
  return { now: keys.filter((near) => near.remaining === 0), then: keys.filter((near) => used(near) >= limit) };
}

function Preview({ policy, limit, shadow }: { policy: Policy; limit: number; shadow: boolean }) {
  const { api } = useSession();
  const near = useResource(`near ${policy.name}`, () => api.get<{ items: NearLimit[] }>(withQuery('/admin/near-limits', { capability: 'tier', limitName: policy.name, limit: 1000 })), 2000);
  return (
    <section className="preview" aria-label="Who would be denied now">
      <Loaded resource={near} what="who would be denied">
        {({ items }) => {
          const { now, then } = deniedBy(items, limit);
          return (
            <>
              <p>
                <b>{shadow ? 'Nobody would be denied: it would only observe.' : `${plural(then.length, 'key')} would be denied now`}</b>
                {!shadow && `, ${count(now.length)} with the present limit.`}
              </p>
              <p className="faint">Of {plural(items.length, 'key')} that this server has seen use at least half of the present limit.</p>
              {!shadow && then.length > 0 && (
                <ul className="preview-keys">
                  {then.slice(0, 8).map((one) => (
                    <li key={one.key}>
                      <span>{one.key}</span>
                      <Usage used={one.limit - one.remaining} limit={Math.max(1, limit)} label={`${one.key}: used of the new limit`} />
                      <span className="number">
                        {count(one.limit - one.remaining)}/{count(limit)}
                      </span>
                    </li>
                  ))}
                  {then.length > 8 && <li className="faint">and {count(then.length - 8)} more</li>}
                </ul>
              )}
            </>
          );
        }}
      </Loaded>
    </section>
  );
}

function Tiers() {
  const { api } = useSession();
  const [edited, setEdited] = useState<Tier | null>(null);
  const tiers = useResource('tiers', async () => {
    const [tiers, enabled] = await Promise.all([api.get<{ items: Tier[] }>('/admin/tiers'), api.get<{ enabled: boolean }>('/admin/rate-limit/enabled')]);
    return { items: tiers.items, enabled: enabled.enabled };
  }, 10_000);
  const [switching, setSwitching] = useState(false);
  return (
    <Panel
      title="Tiers of AI calls"
      aside={
        tiers.data && (
          <>
            {tiers.data.enabled ? <Tag tone="good">limits on</Tag> : <Tag tone="warn">limits off: everything is allowed</Tag>}
            <Act onClick={() => setSwitching(true)}>{tiers.data.enabled ? 'Switch off' : 'Switch on'}</Act>
          </>
        )
      }
    >
      <Loaded resource={tiers} what="tiers">
        {({ items, enabled }) => (
          <>
            <Scroll label="Tiers">
              <table className="grid">
                <thead>
                  <tr>
                    <th scope="col">Tier</th>
                    <th scope="col" className="number">
                      A minute
                    </th>
                    <th scope="col" className="number">
                      At once
                    </th>
                    <th scope="col" className="number">
                      A day
                    </th>
                    <th scope="col">
                      <span className="unseen">Change</span>
                    </th>
                  </tr>
                </thead>
                <tbody>
                  {items.map((tier) => (
                    <tr key={tier.tier}>
                      <th scope="row">{tier.tier}</th>
                      <td className="number">{count(tier.requestsPerMinute)}</td>
                      <td className="number">{count(tier.burstCapacity)}</td>
                      <td className="number">{count(tier.dailyLimit)}</td>
                      <td>
                        <Act onClick={() => setEdited(tier)}>Change</Act>
                      </td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </Scroll>
            {switching && (
              <Confirm
                title={enabled ? 'Switch the limits of AI calls off?' : 'Switch the limits of AI calls on?'}
                action={enabled ? 'Switch off' : 'Switch on'}
                danger={enabled}
                onClose={() => (setSwitching(false), tiers.reload())}
                run={async () => {
                  await api.send('PUT', '/admin/rate-limit/enabled', { enabled: !enabled });
                  return enabled ? 'AI calls are not limited.' : 'AI calls are limited by plan.';
                }}
              >
                <p>{enabled ? 'Every AI call is then allowed and none is counted. Policies stay in force.' : 'AI calls are then limited by the plan of each user.'}</p>
              </Confirm>
            )}
          </>
        )}
      </Loaded>
      {edited && <EditTier tier={edited} onClose={() => (setEdited(null), tiers.reload())} />}
    </Panel>
  );
}

function EditTier({ tier, onClose }: { tier: Tier; onClose(): void }) {
  const { api } = useSession();
  const [minute, setMinute] = useState(String(tier.requestsPerMinute));
  const [burst, setBurst] = useState(String(tier.burstCapacity));
  const [day, setDay] = useState(String(tier.dailyLimit));
  const near = useResource(`tier ${tier.tier}`, () => api.get<{ items: NearLimit[] }>(withQuery('/admin/near-limits', { capability: 'tier', limitName: 'daily', limit: 1000 })));
  // What a user has spent of a day is known, the user's tier is not: the present limit tells.
  const affected = near.data ? deniedBy(near.data.items.filter((one) => one.limit === tier.dailyLimit), Number(day)).then.length : null;
  return (
    <Confirm
      title={`Tier ${tier.tier}`}
      action="Save the tier"
      onClose={onClose}
      run={async () => {
        await api.send('PUT', `/admin/tiers/${part(tier.tier)}`, { requestsPerMinute: Number(minute), burstCapacity: Number(burst), dailyLimit: Number(day) });
        return `The tier ${tier.tier} was saved.`;
      }}
    >
      <div className="fields">
        <Field label="Calls a minute" type="number" value={minute} onChange={setMinute} required autoFocus />
        <Field label="Calls at once" type="number" value={burst} onChange={setBurst} required />
        <Field label="Calls a day" type="number" value={day} onChange={setDay} required />
      </div>
      <p>{affected === null ? ' ' : <b>{plural(affected, 'user')} that this server knows of would be denied for the day now.</b>}</p>
      <p className="faint">For every user of this tier, from the next call on; within 5 seconds on other servers. What was spent stays spent.</p>
    </Confirm>
  );
}

function Subscriptions() {
  const { api } = useSession();
  const [cursor, setCursor] = useState<string | null>(null);
  const subscriptions = useResource(`subscriptions ${cursor ?? ''}`, () => api.get<Page<Subscription>>(withQuery('/admin/subscriptions', { limit: 50, cursor })));
  return (
    <Panel title="Subscriptions" aside={<span className="faint">to change one, look up its user</span>}>
      <Loaded resource={subscriptions} what="subscriptions">
        {({ items, nextCursor }) =>
          items.length === 0 ? (
            <Empty title="Nobody has a subscription: every user is on the free plan." />
          ) : (
            <>
              <Scroll label="Subscriptions">
                <table className="grid">
                  <thead>
                    <tr>
                      <th scope="col">User</th>
                      <th scope="col">Plan</th>
                      <th scope="col">Tier</th>
                      <th scope="col">Ends</th>
                    </tr>
                  </thead>
                  <tbody>
                    {items.map((one) => (
                      <tr key={one.user}>
                        <th scope="row">
                          <a href={to('key', one.user)}>{one.user}</a>
                        </th>
                        <td>{one.plan}</td>
                        <td>{one.tier}</td>
                        <td>{one.expiresAt ? time(one.expiresAt) : 'never'}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </Scroll>
              <Pager first={cursor === null} next={nextCursor} onFirst={() => setCursor(null)} onNext={setCursor} />
            </>
          )
        }
      </Loaded>
    </Panel>
  );
}

export function Pager({ first, next, onFirst, onNext }: { first: boolean; next: string | null; onFirst(): void; onNext(cursor: string): void }) {
  if (first && next === null) return null;
  return (
    <p className="pager">
      <button type="button" className="button" disabled={first} onClick={onFirst}>
        First page
      </button>
      <button type="button" className="button" disabled={next === null} onClick={() => next !== null && onNext(next)}>
        Next page
      </button>
    </p>
  );
}
