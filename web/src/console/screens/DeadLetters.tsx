// Dead letters by what they died of, each group with a sample, and the way back: replay, or discard.
import { useState } from 'react';
import type { DeadLetter, DeadLetterGroup } from '../api';
import { part } from '../api';
import { count, plural, time } from '../format';
import { to, usePlace, useResource, useSession } from '../hooks';
import { Act, Ago, Confirm, Definition, Empty, Loaded, Panel, Scroll } from '../ui';
import { pretty } from './Requests';

interface Groups {
  groups: DeadLetterGroup[];
  scanned: number;
  partial: boolean;
  others: number;
}

/** What the list and the replay filter by. Reasons of messages are matched by the longest part that all of a group share. */
export function filterOf(group: DeadLetterGroup): { topic: string; type?: string; error?: string } {
  const error = group.error.split('…').reduce((longest, piece) => (piece.length > longest.length ? piece : longest), '');
  return { topic: group.topic, ...(group.requestType ? { type: group.requestType } : {}), ...(error.trim() ? { error } : {}) };
}

export function DeadLettersScreen() {
  const { api } = useSession();
  const groups = useResource('dead letters', () => api.get<Groups>('/admin/dlq/groups'), 10_000);
  const [replaying, setReplaying] = useState<{ words: string; filter: object } | null>(null);
  const { name } = usePlace();
  return (
    <>
      <h1>Dead letters</h1>
      <Panel title="By error" aside={<Act onClick={() => setReplaying({ words: 'Every dead letter.', filter: {} })}>Replay all</Act>}>
        <Loaded resource={groups} what="dead letters">
          {({ groups: found, scanned, partial, others }) =>
            found.length === 0 ? (
              <Empty title="Nothing is dead." />
            ) : (
              <>
                <Scroll label="Dead letters by error">
                  <table className="grid">
                    <thead>
                      <tr>
                        <th scope="col" className="number">
                          Count
                        </th>
                        <th scope="col">Died of</th>
                        <th scope="col">Topic</th>
                        <th scope="col">Type</th>
                        <th scope="col">First</th>
                        <th scope="col">Last</th>
                        <th scope="col">
                          <span className="unseen">Actions</span>
                        </th>
                      </tr>
                    </thead>
                    <tbody>
                      {found.map((group) => (
                        <tr key={`${group.topic} ${group.error} ${group.requestType}`}>
                          <td className="number strong">{count(group.count)}</td>
                          <th scope="row" className="why">
                            <a href={to('dead', group.sample.id)}>{group.error}</a>
                            <span className="faint block">{group.sample.reason}</span>
                          </th>
                          <td>{group.topic}</td>
                          <td>{group.requestType ?? '–'}</td>
                          <td className="nowrap">{time(group.oldest)}</td>
                          <td className="nowrap">
                            <Ago at={group.newest} />
                          </td>
                          <td>
                            <Act onClick={() => setReplaying({ words: `${group.error} on ${group.topic}${group.requestType ? `, type ${group.requestType}` : ''}.`, filter: filterOf(group) })}>Replay group</Act>
                          </td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </Scroll>
                <p className="note">
                  {plural(scanned, 'dead letter')} {partial ? 'were looked at, the oldest; there are more.' : 'in all.'} {others > 0 && `${plural(others, 'one')} of rarer errors.`}
                </p>
              </>
            )
          }
        </Loaded>
      </Panel>
      {name !== null && <Sample id={name} onGone={groups.reload} />}
      {replaying && <ReplayMany {...replaying} onClose={() => (setReplaying(null), groups.reload())} />}
    </>
  );
}

function ReplayMany({ words, filter, onClose }: { words: string; filter: object; onClose(): void }) {
  const { api, readOnly } = useSession();
  const preview = useResource(readOnly ? null : 'replay', () => api.send<{ matched: number }>('POST', '/admin/dlq/replay', { ...filter, dryRun: true }));
  return (
    <Confirm
      title="Replay dead letters?"
      action={preview.data ? `Replay ${plural(preview.data.matched, 'dead letter')}` : 'Counting …'}
      disabled={preview.data === null || preview.data.matched === 0}
      onClose={onClose}
      run={async () => {
        const { replayed } = await api.send<{ replayed: number }>('POST', '/admin/dlq/replay', filter);
        return `${plural(replayed, 'dead letter')} replayed.`;
      }}
    >
      <p>{words}</p>
      <Loaded resource={preview} what="how many match">
        {({ matched }) => (
          <p data-testid="affected">
            <b>{plural(matched, 'dead letter')}</b> {matched === 1 ? 'goes' : 'go'} back to where {matched === 1 ? 'it' : 'they'} came from, with all attempts. Repair the cause first: what died of a cause that persists dies again.
          </p>
        )}
      </Loaded>
    </Confirm>
  );
}

function Sample({ id, onGone }: { id: string; onGone(): void }) {
  const { api } = useSession();
  const letter = useResource(`dead ${id}`, () => api.get<DeadLetter>(`/admin/dlq/${part(id)}`));
  const [asking, setAsking] = useState<'replay' | 'discard' | null>(null);
  const close = () => {
    setAsking(null);
    letter.reload();
    onGone();
  };
  return (
    <Panel title="One of them" aside={<a href="#/dead">Close</a>}>
      <Loaded resource={letter} what="the dead letter">
        {(data) => (
          <>
            <Definition
              rows={[
                ['Id', data.requestType ? <a key="i" href={to('requests', data.id)}>{data.id}</a> : data.id],
                ['Topic', data.topic],
                [data.tenantId ? 'Tenant' : 'Key', data.key],
                ['Died', <Ago key="d" at={data.diedAt} />],
                ['Attempts', String(data.attempts)],
                ['Reason', data.reason],
              ]}
            />
            <pre className="body" tabIndex={0} role="region" aria-label="Payload">
              {pretty(data.payload)}
            </pre>
            <p className="actions">
              <Act tone="primary" onClick={() => setAsking('replay')}>
                Replay this one
              </Act>
              <Act tone="danger" onClick={() => setAsking('discard')}>
                Discard this one
              </Act>
            </p>
          </>
        )}
      </Loaded>
      {asking === 'replay' && (
        <Confirm
          title="Replay this dead letter?"
          action="Replay 1 dead letter"
          onClose={close}
          run={async () => {
            await api.send('POST', `/admin/dlq/${part(id)}/replay`);
            return 'It is on its way again.';
          }}
        >
          <p>Repair the cause first: what died of a cause that persists dies again.</p>
        </Confirm>
      )}
      {asking === 'discard' && (
        <Confirm
          title="Throw this dead letter away?"
          action="Discard 1 dead letter"
          danger
          onClose={close}
          run={async () => {
            await api.send('DELETE', `/admin/dlq/${part(id)}`);
            return 'It was discarded. The audit counts it.';
          }}
        >
          <p>This cannot be undone.</p>
        </Confirm>
      )}
    </Panel>
  );
}
