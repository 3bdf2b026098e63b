// Audit: whether the books balance, and what differs where they do not.
import { useState } from 'react';
import { count, plural, span, time } from '../format';
import { useResource, useSession } from '../hooks';
import { Definition, Loaded, Panel, Scroll, Tag } from '../ui';

interface Messages {
  accepted: number;
  done: number;
  discarded: number;
  dead: number;
  inFlight: number;
  difference: number;
}

export interface Books {
  ok: boolean;
  quota: Messages & { users: number; overLimit: string[] };
  slot: { slots: number; counted: number; different: string[]; aboveMaximum: number; dispatched: Messages | null };
  request: {
    accepted: number;
    completed: number;
    failed: number;
    dead: number;
    cancelled: number;
    inFlight: number;
    purged: number;
    erased: number;
    jobs: number;
    difference: number;
    webhooks: Messages;
  };
  tier: { holds: number; open: number; held: number; settled: number; expired: number; keys: number; unsaved: number };
  sale: { products: number; sold: number; persisted: number; different: string[] };
  ofRows: boolean;
  recount: { startedAt: string; ageSeconds: number; differences: string[] } | null;
  recounting: { seconds: number; reading: string } | null;
}

export interface Line {
  name: string;
  left: string;
  right: string;
  /** What is wrong, if anything. */
  faults: string[];
}

/** Both sides of each book, and what is wrong with it. */
export function lines(books: Books): Line[] {
  const messages = (name: string, of: Messages, more: string[] = []): Line => ({
    name,
    left: `${count(of.accepted)} accepted`,
    right: `${count(of.done)} done + ${count(of.discarded)} discarded + ${count(of.dead)} dead + ${count(of.inFlight)} in flight`,
    faults: [...(of.difference === 0 ? [] : [`differs by ${count(of.difference)}`]), ...more],
  });
  const { quota, slot, request, tier, sale } = books;
  return [
    messages('quota: messages', quota, quota.overLimit.map((user) => `${user} is over the limit`)),
    {
      name: 'slot: counters and rows',
      left: `${count(slot.counted)} counted`,
      right: `${count(slot.slots)} slots`,
      faults: [...(slot.counted === slot.slots ? [] : [`differ by ${count(Math.abs(slot.counted - slot.slots))}`]), ...slot.different],
    },
    ...(slot.dispatched ? [messages('slot: dispatched', slot.dispatched)] : []),
    {
      name: 'request: requests',
      left: `${count(request.accepted)} accepted`,
      right: `${count(request.completed)} completed + ${count(request.failed)} failed + ${count(request.dead)} dead + ${count(request.cancelled)} cancelled + ${count(request.inFlight)} in flight + ${count(request.purged)} purged + ${count(request.erased)} erased`,
      faults: request.difference === 0 ? [] : [`differs by ${count(request.difference)}`],
    },
    {
      name: 'request: jobs',
      left: `${count(request.inFlight)} in flight`,
      right: `${count(request.jobs)} jobs`,
      faults: request.inFlight === request.jobs ? [] : [`differ by ${count(Math.abs(request.inFlight - request.jobs))}`],
    },
    messages('request: webhooks', request.webhooks),
    {
      name: 'tier: holds',
      left: `${count(tier.holds)} held`,
      right: `${count(tier.open)} open + ${count(tier.settled)} settled + ${count(tier.expired)} expired`,
      faults: tier.holds === tier.open + tier.settled + tier.expired ? [] : ['the holds differ'],
    },
    { name: 'sale: units', left: `${count(sale.sold)} sold`, right: `${count(sale.persisted)} saved`, faults: sale.different },
  ];
}

export function AuditScreen() {
  const { api } = useSession();
  const [full, setFull] = useState(0);
  const books = useResource(
    `books ${full}`,
    async () => {
      const read = await api.get<Books>(full > 0 && Date.now() - full < 2000 ? '/admin/audit?full=true' : '/admin/audit');
      return read;
    },
    3000,
  );
  return (
    <>
      <h1>Audit</h1>
      <Loaded resource={books} what="the books">
        {(data) => (
          <>
            <section className="verdict" data-tone={data.ok ? 'good' : 'bad'} aria-label="Verdict">
              <p className="verdict-now">{data.ok ? 'The books balance.' : 'The books do not balance.'}</p>
              <p>
                {data.recount === null
                  ? 'Rows were not compared with the books yet.'
                  : `All rows were last compared ${span(data.recount.ageSeconds * 1000)} ago, at ${time(data.recount.startedAt)}: ${data.recount.differences.length === 0 ? 'no difference.' : plural(data.recount.differences.length, 'difference')}`}
              </p>
            </section>
            <Panel
              title="Books"
              aside={
                data.recounting ? (
                  <Tag tone="info">
                    comparing rows: {data.recounting.reading}, {span(data.recounting.seconds * 1000)}
                  </Tag>
                ) : (
                  <button type="button" className="button" onClick={() => setFull(Date.now())}>
                    Compare all rows now
                  </button>
                )
              }
            >
              <Scroll label="Books">
                <table className="grid">
                  <thead>
                    <tr>
                      <th scope="col">Book</th>
                      <th scope="col">Balance</th>
                      <th scope="col">One side</th>
                      <th scope="col">The other</th>
                    </tr>
                  </thead>
                  <tbody>
                    {lines(data).map((line) => (
                      <tr key={line.name}>
                        <th scope="row">{line.name}</th>
                        <td>{line.faults.length === 0 ? <Tag tone="good">balanced</Tag> : <Tag tone="bad">{line.faults.join(', ')}</Tag>}</td>
                        <td className="nowrap">{line.left}</td>
                        <td>{line.right}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </Scroll>
            </Panel>
            {data.recount !== null && data.recount.differences.length > 0 && (
              <Panel title="What differs">
                <ul className="list">
                  {data.recount.differences.map((one) => (
                    <li key={one}>{one}</li>
                  ))}
                </ul>
              </Panel>
            )}
            <Panel title="Size">
              <Definition
                rows={[
                  ['Users with a quota', count(data.quota.users)],
                  ['Slots', count(data.slot.slots)],
                  ['Slots above a lowered maximum', count(data.slot.aboveMaximum)],
                  ['Products', count(data.sale.products)],
                  ['Keys with spending in memory', `${count(data.tier.keys)}, ${count(data.tier.unsaved)} not saved yet`],
                ]}
              />
            </Panel>
          </>
        )}
      </Loaded>
    </>
  );
}
