// Requests: what has not ended and why, every request by filter, one request's timeline, and actions on all that match.
import { useState } from 'react';
import type { ReactNode } from 'react';
import type { Page, RequestDetail, RequestSummary, Unfinished } from '../api';
import { part, withQuery } from '../api';
import { count, localTimes, plural, relative, time } from '../format';
import { go, to, useLive, useNow, usePlace, useResource, useSession } from '../hooks';
import { recent } from '../live';
import type { Tone } from '../ui';
import { Act, Ago, Choice, Confirm, Definition, Empty, Field, Loaded, Panel, Scroll, Tag } from '../ui';

const STATUSES = ['ACCEPTED', 'PENDING_ENQUEUE', 'IN_PROGRESS', 'COMPLETED', 'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED', 'CANCELLED'] as const;

const TONES: Record<string, Tone> = {
  COMPLETED: 'good',
  FAILED_PERMANENT: 'bad',
  FAILED_RETRY_EXHAUSTED: 'bad',
  CANCELLED: 'plain',
  IN_PROGRESS: 'info',
};

const STATES: Record<string, [string, Tone]> = {
  pendingEnqueue: ['broker lacks it', 'warn'],
  waiting: ['waiting', 'warn'],
  running: ['running', 'info'],
  workerLost: ['worker lost', 'bad'],
  retrying: ['retrying', 'warn'],
  deferred: ['held back', 'warn'],
  awaitingCallback: ['awaits callback', 'plain'],
};

export function RequestsScreen() {
  const { name } = usePlace();
  if (name !== null) return <OneRequest id={name} />;
  return <AllRequests />;
}

type View = 'unfinished' | 'all';

function AllRequests() {
  const { query } = usePlace();
  const view: View = query.get('view') === 'all' ? 'all' : 'unfinished';
  const filter = { tenant: query.get('tenant') ?? '', type: query.get('type') ?? '', status: query.get('status') ?? '', downstream: query.get('downstream') ?? '' };
  const set = (change: Partial<typeof filter> & { view?: View }) => go(to('requests', null, { view, ...filter, ...change }));
  return (
    <>
      <h1>Requests</h1>
      <Flow onStatus={(status) => set({ view: 'all', status })} onUnfinished={() => set({ view: 'unfinished', status: '' })} />
      <div className="row-form">
        <Choice label="View" value={view} onChange={(next) => set({ view: next })} options={[['unfinished', 'Not ended, longest due first'] as const, ['all', 'All, newest first'] as const]} />
        <Applied key={`tenant ${filter.tenant}`} label="Tenant" value={filter.tenant} onApply={(tenant) => set({ tenant })} />
        <Applied key={`type ${filter.type}`} label="Type" value={filter.type} onApply={(type) => set({ type })} />
        {view === 'all' ? (
          <Field label="Status" value={filter.status} onChange={(status) => set({ status })} options={[['', 'any'], ...STATUSES.map((one) => [one, one] as [string, string])]} />
        ) : (
          <Applied key={`downstream ${filter.downstream}`} label="Downstream" value={filter.downstream} onApply={(downstream) => set({ downstream })} />
        )}
        <Find />
      </div>
      {view === 'unfinished' ? <UnfinishedList filter={filter} /> : <RequestList filter={filter} />}
    </>
  );
}

/** A filter that counts once it is entered. */
function Applied({ label, value, onApply }: { label: string; value: string; onApply(value: string): void }) {
  const [text, setText] = useState(value);
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        onApply(text.trim());
      }}
      onBlur={() => text.trim() !== value && onApply(text.trim())}
    >
      <Field label={label} value={text} onChange={setText} type="search" size={12} />
    </form>
  );
}

function Find() {
  const [text, setText] = useState('');
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        if (text.trim() !== '') go(to('requests', text.trim()));
      }}
    >
      <Field label="Request id" value={text} onChange={setText} type="search" size={18} />
    </form>
  );
}

/** How requests move, with the numbers that are known without counting millions: what is unfinished, and what ended lately. */
function Flow({ onStatus, onUnfinished }: { onStatus(status: string): void; onUnfinished(): void }) {
  const { snapshot, seconds } = useLive();
  const downstreams = snapshot?.backlog?.downstreams ?? [];
  const sum = (pick: (one: (typeof downstreams)[number]) => number) => downstreams.reduce((all, one) => all + pick(one), 0);
  const ended = (name: string) => recent(seconds, name, 900).sum;
  const unknown = snapshot?.backlog === null;
  const box = (words: string, value: number | null, onClick: () => void, tone?: string): ReactNode => (
    <button type="button" className="flow-box" onClick={onClick} data-tone={tone}>
      <b>{value === null || unknown ? '–' : value >= 10_000 ? '10k+' : count(value)}</b>
      <span>{words}</span>
    </button>
  );
  return (
    <section className="flow" aria-label="State of requests">
      <div className="flow-group">
        <h2>Now</h2>
        {box('waiting', sum((one) => one.waiting), onUnfinished)}
        {box('running', sum((one) => one.running), onUnfinished)}
        {box('parked', sum((one) => one.parked), onUnfinished)}
        {box('dead', snapshot?.backlog?.deadRequests ?? null, () => go('#/dead'), (snapshot?.backlog?.deadRequests ?? 0) > 0 ? 'bad' : undefined)}
      </div>
      <div className="flow-group">
        <h2>Ended here in 15 min</h2>
        {box('completed', ended('request.completed'), () => onStatus('COMPLETED'))}
        {box('rejected', ended('request.rejected'), () => onStatus('FAILED_PERMANENT'))}
        {box('exhausted', ended('request.exhausted'), () => onStatus('FAILED_RETRY_EXHAUSTED'))}
        {box('cancelled', ended('request.cancelled'), () => onStatus('CANCELLED'))}
      </div>
    </section>
  );
}

interface Filter {
  tenant: string;
  type: string;
  status: string;
  downstream: string;
}

function UnfinishedList({ filter }: { filter: Filter }) {
  const { api } = useSession();
  const { tenant, type, downstream } = filter;
  const [cancelling, setCancelling] = useState(false);
  const named = { tenant, type, downstream: downstream === 'default' ? '' : downstream };
  const path = `${withQuery('/admin/requests/unfinished', { tenant, type, limit: 200 })}${downstream ? `&downstream=${part(named.downstream)}` : ''}`;
  const list = useResource(path, () => api.get<{ items: Unfinished[]; partial: boolean }>(path), 3000);
  const isFiltered = tenant !== '' || type !== '' || downstream !== '';
  return (
    <Panel
      title="Not ended"
      aside={isFiltered ? <Act tone="danger" onClick={() => setCancelling(true)}>Cancel all that match</Act> : <span className="faint">filter to act on many</span>}
    >
      <Loaded resource={list} what="requests">
        {({ items, partial }) =>
          items.length === 0 ? (
            <Empty title={isFiltered ? 'Nothing that matches is unfinished.' : 'Nothing is stuck: every request has ended.'} />
          ) : (
            <>
              <Scroll label="Requests that have not ended">
                <table className="grid">
                  <thead>
                    <tr>
                      <th scope="col">State</th>
                      <th scope="col">Why</th>
                      <th scope="col">Due</th>
                      <th scope="col">Downstream</th>
                      <th scope="col">Tenant</th>
                      <th scope="col">Type</th>
                      <th scope="col" className="number">
                        Attempts
                      </th>
                      <th scope="col">Accepted</th>
                      <th scope="col">Request</th>
                    </tr>
                  </thead>
                  <tbody>
                    {items.map((one) => (
                      <UnfinishedRow key={one.requestId} one={one} />
                    ))}
                  </tbody>
                </table>
              </Scroll>
              {partial && <p className="note">There are more than these {count(items.length)}. Filter by downstream, tenant or type.</p>}
            </>
          )
        }
      </Loaded>
      {cancelling && <CancelMany filter={{ ...(tenant ? { tenant } : {}), ...(type ? { type } : {}), ...(downstream ? { downstream: named.downstream } : {}) }} onClose={() => (setCancelling(false), list.reload())} />}
    </Panel>
  );
}

function UnfinishedRow({ one }: { one: Unfinished }) {
  const now = useNow(5000);
  const [words, tone] = STATES[one.job.state] ?? [one.job.state, 'plain' as const];
  return (
    <tr>
      <td>
        <Tag tone={tone}>{words}</Tag>
      </td>
      <td className="why">{localTimes(one.job.why)}</td>
      <td className="nowrap">{relative(one.job.dueAt, now)}</td>
      <td>{one.job.downstream === '' ? 'default' : one.job.downstream}</td>
      <td>{one.tenantId}</td>
      <td>{one.requestType}</td>
      <td className="number">{one.attempts}</td>
      <td className="nowrap">{time(one.acceptedAt)}</td>
      <td>
        <a className="id" href={to('requests', one.requestId)}>
          {one.requestId}
        </a>
      </td>
    </tr>
  );
}

function CancelMany({ filter, onClose }: { filter: { tenant?: string; type?: string; downstream?: string }; onClose(): void }) {
  const { api } = useSession();
  const preview = useResource('cancel', () => api.send<{ matched: number; partial: boolean }>('POST', '/admin/requests/cancel', { ...filter, dryRun: true }));
  const words = Object.entries(filter).map(([name, value]) => `${name} ${value === '' ? 'default' : value}`);
  return (
    <Confirm
      title="Cancel all that match?"
      action={preview.data ? `Cancel ${plural(preview.data.matched, 'request')}` : 'Counting …'}
      danger
      disabled={preview.data === null || preview.data.matched === 0}
      onClose={onClose}
      run={async () => {
        const { cancelled } = await api.send<{ cancelled: number }>('POST', '/admin/requests/cancel', filter);
        return `${plural(cancelled, 'request')} cancelled.`;
      }}
    >
      <p>Unfinished requests of {words.join(', ')}.</p>
      <Loaded resource={preview} what="how many match">
        {({ matched, partial }) => (
          <p data-testid="affected">
            <b>{plural(matched, 'request')}</b> {matched === 1 ? 'matches' : 'match'} now{partial ? ', and there may be more' : ''}. This cannot be undone: they are not called any more, and what a call under way brings is thrown away.
          </p>
        )}
      </Loaded>
    </Confirm>
  );
}

function RequestList({ filter }: { filter: Filter }) {
  const { api } = useSession();
  const { tenant, type, status } = filter;
  const [cursors, setCursors] = useState<string[]>([]);
  const cursor = cursors.at(-1) ?? null;
  const path = withQuery('/admin/requests', { tenant, type, status, limit: 100, cursor });
  const list = useResource(path, () => api.get<Page<RequestSummary>>(path), cursor === null ? 5000 : 0);
  return (
    <Panel title="All requests">
      <Loaded resource={list} what="requests">
        {({ items, nextCursor }) => (
          <>
            {items.length === 0 ? (
              <Empty title={nextCursor === null ? 'No request matches.' : 'None among the 10,000 that were looked at.'}>
                {nextCursor !== null && <p>Older ones may match: go on with the next page.</p>}
              </Empty>
            ) : (
              <Scroll label="Requests">
                <table className="grid">
                  <thead>
                    <tr>
                      <th scope="col">Status</th>
                      <th scope="col">Accepted</th>
                      <th scope="col">Tenant</th>
                      <th scope="col">Type</th>
                      <th scope="col" className="number">
                        Attempts
                      </th>
                      <th scope="col">Failure</th>
                      <th scope="col">Changed</th>
                      <th scope="col">Request</th>
                    </tr>
                  </thead>
                  <tbody>
                    {items.map((one) => (
                      <tr key={one.requestId}>
                        <td>
                          <Tag tone={TONES[one.status] ?? 'warn'}>{one.status}</Tag>
                        </td>
                        <td className="nowrap">{time(one.acceptedAt)}</td>
                        <td>{one.tenantId}</td>
                        <td>{one.requestType}</td>
                        <td className="number">{one.attempts}</td>
                        <td className="why">{one.failureCode ?? '–'}</td>
                        <td className="nowrap">{time(one.updatedAt)}</td>
                        <td>
                          <a className="id" href={to('requests', one.requestId)}>
                            {one.requestId}
                          </a>
                        </td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </Scroll>
            )}
            {(cursors.length > 0 || nextCursor !== null) && (
              <p className="pager">
                <button type="button" className="button" disabled={cursors.length === 0} onClick={() => setCursors(cursors.slice(0, -1))}>
                  Newer
                </button>
                <button type="button" className="button" disabled={nextCursor === null} onClick={() => nextCursor !== null && setCursors([...cursors, nextCursor])}>
                  Older
                </button>
              </p>
            )}
          </>
        )}
      </Loaded>
    </Panel>
  );
}

interface Step {
  at: string | null;
  words: string;
  detail?: string | undefined;
  tone: Tone;
}

/** What is known of a request's way, in order. Single attempts are in the log, under the trace. */
export function timeline(request: RequestDetail): Step[] {
  const steps: Step[] = [{ at: request.acceptedAt, words: 'Accepted', detail: `for ${request.tenantId}, type ${request.requestType}`, tone: 'plain' }];
  const failed = request.failureCode !== null;
  const ended = request.job === null && TONES[request.status] !== undefined && request.status !== 'IN_PROGRESS';
  const before = ended && (request.status === 'COMPLETED' || request.status === 'CANCELLED') ? request.attempts - 1 : request.attempts;
  if (before > 0 && failed) {
    steps.push({ at: ended ? null : request.updatedAt, words: before === 1 ? 'Attempt 1 failed' : `Attempts 1 to ${before} failed`, detail: `${request.failureCode}: ${request.failureMessage ?? ''}`, tone: 'warn' });
  } else if (request.attempts > 0 && !ended) {
    steps.push({ at: request.updatedAt, words: `Attempt ${request.attempts} began`, tone: 'info' });
  } else if (before > 0) {
    steps.push({ at: null, words: before === 1 ? 'Attempt 1 did not succeed' : `Attempts 1 to ${before} did not succeed`, tone: 'warn' });
  }
  if (ended) {
    const words: Record<string, string> = {
      COMPLETED: `Completed with attempt ${request.attempts}`,
      FAILED_PERMANENT: 'Rejected: not tried again',
      FAILED_RETRY_EXHAUSTED: 'Given up: a dead letter, unless it was discarded',
      CANCELLED: 'Cancelled',
    };
    steps.push({ at: request.updatedAt, words: words[request.status] ?? request.status, tone: TONES[request.status] ?? 'plain' });
  } else if (request.job) {
    const [words, tone] = STATES[request.job.state] ?? [request.job.state, 'plain' as const];
    steps.push({ at: request.job.dueAt, words: `Now: ${words}`, detail: request.job.why, tone });
  } else {
    steps.push({ at: request.updatedAt, words: `Now: ${request.status}`, tone: 'info' });
  }
  return steps;
}

function OneRequest({ id }: { id: string }) {
  const { api } = useSession();
  const request = useResource(`request ${id}`, () => api.get<RequestDetail>(`/admin/requests/${part(id)}`), 3000);
  return (
    <>
      <h1 className="name">Request {id}</h1>
      <Loaded resource={request} what="the request">
        {(data) => (
          <div className="columns">
            <Panel title="Timeline" aside={<Tag tone={TONES[data.status] ?? 'warn'}>{data.status}</Tag>}>
              <ol className="timeline">
                {timeline(data).map((step) => (
                  <li key={step.words} data-tone={step.tone}>
                    <span className="timeline-at">{step.at === null ? '' : time(step.at)}</span>
                    <span>
                      <b>{step.words}</b>
                      {step.detail && <span className="timeline-detail">{localTimes(step.detail)}</span>}
                    </span>
                  </li>
                ))}
              </ol>
              <p className="note">
                {data.traceId === null ? 'No trace is known.' : <>Each attempt is a line of the log and a span of trace <code>{data.traceId}</code>.</>}
              </p>
              {data.status === 'FAILED_RETRY_EXHAUSTED' && <Replay id={id} onDone={request.reload} />}
            </Panel>
            <Panel title="Contents">
              <Definition
                rows={[
                  ['Tenant', <a key="t" href={to('requests', null, { view: 'all', tenant: data.tenantId })}>{data.tenantId}</a>],
                  ['Type', data.requestType],
                  ['Attempts', String(data.attempts)],
                  ['Accepted', <Ago key="a" at={data.acceptedAt} />],
                  ['Changed', <Ago key="c" at={data.updatedAt} />],
                  ['Callback', data.callbackUrl ?? 'none'],
                ]}
              />
              <h3>Payload</h3>
              <pre className="body" tabIndex={0} role="region" aria-label="Payload">
                {pretty(data.payload)}
              </pre>
              {data.status === 'COMPLETED' && (
                <>
                  <h3>Result</h3>
                  <pre className="body" tabIndex={0} role="region" aria-label="Result">
                    {data.resultError ?? JSON.stringify(data.result, null, 2)}
                  </pre>
                </>
              )}
            </Panel>
          </div>
        )}
      </Loaded>
    </>
  );
}

function Replay({ id, onDone }: { id: string; onDone(): void }) {
  const { api } = useSession();
  const [asking, setAsking] = useState(false);
  return (
    <p>
      <Act tone="primary" onClick={() => setAsking(true)}>
        Replay
      </Act>
      {asking && (
        <Confirm
          title="Replay this request?"
          action="Replay 1 request"
          onClose={() => (setAsking(false), onDone())}
          run={async () => {
            await api.send('POST', `/admin/dlq/${part(id)}/replay`);
            return 'The request begins again with all its attempts.';
          }}
        >
          <p>Repair the cause first: what died of a cause that persists dies again.</p>
        </Confirm>
      )}
    </p>
  );
}

/** JSON with line breaks; any other text as it is. */
export function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
