// Key: one user or key. Whether it is denied now and why, why it last was, every limit with its window, and how to change that.
import { useState } from 'react';
import type { FormEvent } from 'react';
import type { KeyPolicy, KeyState, NearLimit } from '../api';
import { part, withQuery } from '../api';
import { count, limitWords, localTimes, plural, relative, span, time } from '../format';
import { go, to, useLive, useNow, usePlace, useResource, useSession } from '../hooks';
import type { Resource } from '../hooks';
import { Act, Ago, Confirm, Empty, Field, Loaded, Panel, Scroll, Tag, Turning, Usage } from '../ui';

const EVERY_MS = 2000;

export function KeyScreen() {
  const { name } = usePlace();
  return name === null ? <Choose /> : <OneKey name={name} />;
}

/** Without a key: those that an operator is most likely to want. */
function Choose() {
  const { api } = useSession();
  const [text, setText] = useState('');
  const near = useResource('near', () => api.get<{ items: NearLimit[] }>(withQuery('/admin/near-limits', { limit: 200 })), 5000);
  function submit(event: FormEvent): void {
    event.preventDefault();
    if (text.trim() !== '') go(to('key', text.trim()));
  }
  return (
    <>
      <h1>Key</h1>
      <form className="row-form" onSubmit={submit}>
        <Field label="User or key" value={text} onChange={setText} type="search" size={32} hint="A userId of quota, the sub of a token, or a key under a policy." />
        <button type="submit" className="button button-primary">
          Look it up
        </button>
      </form>
      <Panel title="Near a limit or denied" aside={<span className="faint">as this server has seen it since it started</span>}>
        <Loaded resource={near} what="keys near a limit">
          {({ items }) => (items.length === 0 ? <Empty title="This server has denied nobody, and nobody has used half of a limit." /> : <NearTable items={items} />)}
        </Loaded>
      </Panel>
    </>
  );
}

function NearTable({ items }: { items: NearLimit[] }) {
  return (
    <Scroll label="Keys near a limit">
      <table className="grid">
        <thead>
          <tr>
            <th scope="col">Key</th>
            <th scope="col">Limit</th>
            <th scope="col">Used</th>
            <th scope="col" className="number">
              Denied
            </th>
            <th scope="col">Last denial</th>
            <th scope="col">Turns</th>
          </tr>
        </thead>
        <tbody>
          {items.map((one) => (
            <tr key={`${one.capability} ${one.limitName} ${one.key}`}>
              <th scope="row">
                <a href={to('key', one.key)}>{one.key}</a>
              </th>
              <td>{limitWords(one.limitName)}</td>
              <td className="nowrap">
                <Usage used={one.limit - one.remaining} limit={one.limit} label={`${one.key}: used of ${limitWords(one.limitName)}`} /> {count(one.limit - one.remaining)}/{count(one.limit)}
              </td>
              <td className="number">{count(one.denials)}</td>
              <td className="nowrap">{one.lastDenial ? <Ago at={one.lastDenial.at} /> : '–'}</td>
              <td className="nowrap">
                <Turning endsAt={one.until === null ? null : Date.parse(one.until)} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

export interface Denial {
  limit: string;
  why: string;
  /** When it would be allowed, if ever. */
  until: number | null;
}

/** What denies a key now. Policies that only observe deny nothing. */
export function denials(state: KeyState, at: number): Denial[] {
  const found: Denial[] = [];
  const { quota, plan } = state;
  if (quota !== null && !quota.allowed) {
    found.push({ limit: 'quota', why: quota.explanation, until: quota.resetAt === null ? null : Date.parse(quota.resetAt) });
  }
  for (const policy of state.policies.filter((one) => !one.allowed)) {
    found.push({ limit: policy.policy, why: policy.explanation, until: policy.retryAfterMs === null ? null : at + policy.retryAfterMs });
  }
  if (plan.enabled) {
    for (const [name, meter] of [['daily', plan.daily] as const, ['minute', plan.minute] as const]) {
      if (meter.remaining > 0) continue;
      const words = `All ${count(meter.limit)} AI calls of the plan ${plan.plan} are spent; it refills bit by bit, all of it in ${span(meter.resetAfterMs)}.`;
      found.push({ limit: name, why: words, until: null });
    }
  }
  return found;
}

function OneKey({ name }: { name: string }) {
  const { api } = useSession();
  const state = useResource(`key ${name}`, () => api.get<KeyState>(`/admin/keys/${part(name)}`), EVERY_MS);
  return (
    <>
      <h1 className="name">{name}</h1>
      <Loaded resource={state} what="the key">
        {(data) => (
          <>
            <Verdict state={data} at={state.at} />
            <Limits state={data} at={state.at} resource={state} />
            <Remembered state={data} />
          </>
        )}
      </Loaded>
    </>
  );
}

function Verdict({ state, at }: { state: KeyState; at: number }) {
  const now = useNow();
  const found = denials(state, at);
  const last = state.remembered.filter((one) => one.lastDenial !== null).sort((one, other) => Date.parse(other.lastDenial?.at ?? '') - Date.parse(one.lastDenial?.at ?? ''))[0];
  return (
    <section className="verdict" data-tone={found.length > 0 ? 'bad' : 'good'} aria-label="Verdict">
      {found.length === 0 ? (
        <p className="verdict-now">Would be allowed now, by every limit that this key has.</p>
      ) : (
        found.map((denial) => (
          <div key={denial.limit}>
            <p className="verdict-now">
              Denied now by {limitWords(denial.limit)}
              {denial.until !== null && denial.until > now && <>: allowed again {relative(denial.until, now)}, at {time(denial.until)}</>}
            </p>
            <p>{localTimes(denial.why)}</p>
          </div>
        ))
      )}
      <p data-testid="last-denial" className={last ? '' : 'faint'}>
        {last?.lastDenial ? (
          <>
            <b>Last denial</b> <Ago at={last.lastDenial.at} />, at {time(last.lastDenial.at)}: {lastWords(last)}
          </>
        ) : (
          'This server has denied nothing to this key since it started.'
        )}
      </p>
    </section>
  );
}

/** Why the last denial was one, as it was then. */
export function lastWords({ limitName, lastDenial, denials: many }: NearLimit): string {
  if (lastDenial === null) return '';
  const { limit, remaining, until } = lastDenial;
  const room = remaining === 0 ? `all ${count(limit)} were used` : `${count(remaining)} of ${count(limit)} were left, too few for its cost`;
  const fits = until === null ? 'the cost is above the limit and never fits' : `it would have fit from ${time(until)}`;
  return `${limitWords(limitName)} decided, ${room}; ${fits}. ${plural(many, 'denial')} by it so far.`;
}

type Change = { kind: 'quota' } | { kind: 'plan' } | { kind: 'reset'; policy: string } | null;

function Limits({ state, at, resource }: { state: KeyState; at: number; resource: Resource<KeyState> }) {
  const [change, setChange] = useState<Change>(null);
  const [all, setAll] = useState(false);
  const { quota, plan, policies } = state;
  const used = policies.filter((one) => one.remaining < one.limit || !one.allowed);
  const shown = all ? policies : used;
  const close = () => (setChange(null), resource.reload());
  return (
    <Panel title="Limits" aside={<Act onClick={() => setChange({ kind: 'quota' })}>{quota ? 'Change quota' : 'Give a quota'}</Act>}>
      <Scroll label="Limits of this key">
        <table className="grid">
          <thead>
            <tr>
              <th scope="col">Limit</th>
              <th scope="col">Now</th>
              <th scope="col">Used</th>
              <th scope="col">Window turns</th>
              <th scope="col">Why</th>
              <th scope="col">
                <span className="unseen">Change</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {quota && (
              <tr>
                <th scope="row">message quota</th>
                <td>{quota.allowed ? <Tag tone="good">allowed</Tag> : <Tag tone="bad">denied</Tag>}</td>
                <td className="nowrap">
                  <Usage used={quota.limit - quota.remaining} limit={quota.limit} label="Used of the quota" /> {count(quota.limit - quota.remaining)}/{count(quota.limit)}
                </td>
                <td className="nowrap">
                  <Turning beganAt={Date.parse(quota.windowBeganAt)} endsAt={quota.resetAt === null ? null : Date.parse(quota.resetAt)} />
                </td>
                <td className="why">{localTimes(quota.explanation)}</td>
                <td>
                  <Act onClick={() => setChange({ kind: 'quota' })}>Change</Act>
                </td>
              </tr>
            )}
            {shown.map((policy) => (
              <PolicyRow key={policy.policy} policy={policy} at={at} onReset={() => setChange({ kind: 'reset', policy: policy.policy })} />
            ))}
            {plan.enabled &&
              (['minute', 'daily'] as const).map((name) => (
                <tr key={name}>
                  <th scope="row">
                    {limitWords(name)} <span className="faint">{plan.plan}</span>
                  </th>
                  <td>{plan[name].remaining > 0 ? <Tag tone="good">allowed</Tag> : <Tag tone="bad">denied</Tag>}</td>
                  <td className="nowrap">
                    <Usage used={plan[name].limit - plan[name].remaining} limit={plan[name].limit} label={`Used of ${limitWords(name)}`} /> {count(plan[name].limit - plan[name].remaining)}/{count(plan[name].limit)}
                  </td>
                  <td className="nowrap">{plan[name].resetAfterMs === 0 ? <span className="faint">–</span> : <Turning endsAt={at + plan[name].resetAfterMs} />}</td>
                  <td className="why">
                    {plan.subscribed ? `Subscribed to ${plan.plan}${plan.expiresAt ? ` until ${time(plan.expiresAt)}` : ''}.` : 'No subscription: the free plan, unless the token claims another.'}
                  </td>
                  <td>{name === 'minute' && <Act onClick={() => setChange({ kind: 'plan' })}>Change</Act>}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </Scroll>
      {quota === null && <p className="note">No message quota: sends of this user are refused with 404.</p>}
      {policies.length > used.length && (
        <p className="note">
          {all ? 'All policies are shown. ' : `${plural(policies.length - used.length, 'policy', 'policies')} of which this key has used nothing ${policies.length - used.length === 1 ? 'is' : 'are'} left out. `}
          <button type="button" className="text-button" onClick={() => setAll(!all)}>
            {all ? 'Only what is used' : 'Show all'}
          </button>
        </p>
      )}
      {change?.kind === 'quota' && <ChangeQuota state={state} onClose={close} />}
      {change?.kind === 'plan' && <ChangePlan state={state} onClose={close} />}
      {change?.kind === 'reset' && <ResetKey name={state.key} policy={change.policy} onClose={close} />}
    </Panel>
  );
}

function PolicyRow({ policy, at, onReset }: { policy: KeyPolicy; at: number; onReset(): void }) {
  const used = policy.limit - policy.remaining;
  return (
    <tr>
      <th scope="row">
        <a href={to('policies', policy.policy)}>{policy.policy}</a> {policy.shadow && <Tag>only observes</Tag>}
      </th>
      <td>{policy.allowed ? <Tag tone="good">allowed</Tag> : <Tag tone="bad">denied</Tag>}</td>
      <td className="nowrap">
        <Usage used={used} limit={policy.limit} label={`Used of policy ${policy.policy}`} /> {count(used)}/{count(policy.limit)}
      </td>
      <td className="nowrap">{policy.resetAfterMs === 0 ? <span className="faint">–</span> : <Turning endsAt={at + policy.resetAfterMs} />}</td>
      <td className="why">{localTimes(policy.explanation)}</td>
      <td>{used > 0 && <Act onClick={onReset}>Reset</Act>}</td>
    </tr>
  );
}

function ChangeQuota({ state, onClose }: { state: KeyState; onClose(): void }) {
  const { api } = useSession();
  const [limit, setLimit] = useState(String(state.quota?.limit ?? 50));
  const [minutes, setMinutes] = useState(String(state.quota?.windowMinutes ?? 60));
  const [fresh, setFresh] = useState(state.quota === null);
  return (
    <Confirm
      title={`Quota of ${state.key}`}
      action={fresh ? 'Save, and begin a new window' : 'Save'}
      onClose={onClose}
      run={async () => {
        await api.send('POST', '/api/config', { userId: state.key, rateLimit: Number(limit), timeWindow: Number(minutes), keepCount: !fresh });
        return `The quota of ${state.key} is ${plural(Number(limit), 'message')} in ${minutes} min.`;
      }}
    >
      <Field label="Messages" type="number" value={limit} onChange={setLimit} required autoFocus />
      <Field label="Window in minutes" type="number" value={minutes} onChange={setMinutes} required />
      {state.quota && (
        <label className="check">
          <input type="checkbox" checked={fresh} onChange={(event) => setFresh(event.target.checked)} /> Begin a new window with a full quota
        </label>
      )}
    </Confirm>
  );
}

const PLANS = ['FREE', 'STARTER_MONTHLY', 'STARTER_YEARLY', 'PRO_MONTHLY', 'PRO_YEARLY', 'BUSINESS_MONTHLY', 'BUSINESS_YEARLY'];

function ChangePlan({ state, onClose }: { state: KeyState; onClose(): void }) {
  const { api } = useSession();
  const [plan, setPlan] = useState(state.plan.plan);
  return (
    <Confirm
      title={`Plan of ${state.key}`}
      action="Subscribe"
      onClose={onClose}
      run={async () => {
        await api.send('PUT', `/admin/subscriptions/${part(state.key)}`, { plan });
        return `${state.key} is subscribed to ${plan}.`;
      }}
    >
      <Field label="Plan" value={plan} onChange={setPlan} options={PLANS} hint="From the next call on; within 5 seconds on other servers. What was spent stays spent." />
    </Confirm>
  );
}

function ResetKey({ name, policy, onClose }: { name: string; policy: string; onClose(): void }) {
  const { api } = useSession();
  return (
    <Confirm
      title={`Reset ${name} under ${policy}?`}
      action="Forget what was spent"
      onClose={onClose}
      run={async () => {
        await api.send('DELETE', `/admin/policies/${part(policy)}/keys/${part(name)}`);
        return `${name} has everything left under ${policy}.`;
      }}
    >
      <p>The key has all of the limit again. This affects this one key.</p>
    </Confirm>
  );
}

function Remembered({ state }: { state: KeyState }) {
  const { hello } = useLive();
  return (
    <Panel title="Last decisions near a limit" aside={<span className="faint">by this server{hello ? `, since ${time(hello.startedAt)} at most` : ''}</span>}>
      {state.remembered.length === 0 ? (
        <Empty title="None: this key has used less than half of its limits, or another server decided." />
      ) : (
        <Scroll label="Last decisions">
          <table className="grid">
            <thead>
              <tr>
                <th scope="col">Limit</th>
                <th scope="col">Last decision</th>
                <th scope="col" className="number">
                  Left then
                </th>
                <th scope="col" className="number">
                  Denials
                </th>
                <th scope="col">Last denial</th>
              </tr>
            </thead>
            <tbody>
              {state.remembered.map((one) => (
                <tr key={`${one.capability} ${one.limitName}`}>
                  <th scope="row">{limitWords(one.limitName)}</th>
                  <td className="nowrap">
                    <Ago at={one.at} />
                  </td>
                  <td className="number">
                    {count(one.remaining)}/{count(one.limit)}
                  </td>
                  <td className="number">{count(one.denials)}</td>
                  <td className="why">{one.lastDenial ? `${time(one.lastDenial.at)}: ${lastWords(one)}` : '–'}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </Panel>
  );
}
