// Sale: what is left and how fast it goes, who watches, what looks odd, and whether sold and saved agree.
import { useEffect, useMemo, useState } from 'react';
import type { Page, Product } from '../api';
import { ApiFailure, part, withQuery } from '../api';
import { Chart } from '../chart';
import { count, plural, short, span, time } from '../format';
import { go, to, useLive, useNow, usePlace, useResource, useSession } from '../hooks';
import { recent } from '../live';
import { columns } from './Now';
import { Definition, Empty, Loaded, Panel, Scroll, Tag, Usage } from '../ui';

interface Anomaly {
  pattern: string;
  key: string;
  sku: string | null;
  count: number;
  firstSeen: string;
  lastSeen: string;
}

interface Purchase {
  purchaseNo: string;
  userId: string;
  purchasedAt: string;
}

interface SaleBooks {
  sale: { different: string[]; items: { sku: string; initialStock: number; sold: number; persisted: number }[] };
}

const RANK = { ACTIVE: 0, UPCOMING: 1, ENDED: 2 };

export function SaleScreen() {
  const { api } = useSession();
  const { name } = usePlace();
  const products = useResource('products', () => api.get<{ items: Product[] }>('/api/v1/products'), 2000);
  return (
    <>
      <h1>Sale</h1>
      <Loaded resource={products} what="sales">
        {({ items }) => {
          const sorted = [...items].sort((one, other) => RANK[one.state] - RANK[other.state] || Date.parse(other.startTime) - Date.parse(one.startTime));
          const chosen = sorted.find((one) => one.sku === name) ?? sorted[0];
          return chosen === undefined ? (
            <Empty title="There is no sale yet.">
              <p>
                <code>weir sale demo</code> runs one with simulated buyers; <a href="/sale/admin.html">the product admin</a> plans one.
              </p>
            </Empty>
          ) : (
            <>
              <OneSale product={chosen} />
              <Products items={sorted} chosen={chosen.sku} />
              <div className="columns">
                <Anomalies />
                <Reconciliation />
              </div>
            </>
          );
        }}
      </Loaded>
    </>
  );
}

const stateTag = (product: Product) => <Tag tone={product.state === 'ACTIVE' ? 'good' : product.state === 'UPCOMING' ? 'info' : 'plain'}>{product.state === 'ENDED' ? (product.endReason ?? 'ENDED') : product.state}</Tag>;

/** What was left after each purchase: steps down from the initial stock. */
export function stockCurve(product: Product, purchases: Purchase[], now: number): { x: number[]; left: number[] } {
  const start = Date.parse(product.startTime);
  const end = product.state === 'ENDED' ? Date.parse(product.endTime) : Math.max(now, start);
  const times = purchases.map((one) => Date.parse(one.purchasedAt)).sort((one, other) => one - other);
  const x: number[] = [start / 1000];
  const left: number[] = [product.initialStock];
  // A point for each of 500 steps of time shows all that a screen can.
  const step = Math.max(1, (Math.min(end, times.at(-1) ?? end) - start) / 500);
  let sold = 0;
  let at = 0;
  for (let tick = start + step; at < times.length; tick += step) {
    while (at < times.length && (times[at] ?? 0) <= tick) at += 1;
    if (at === sold) continue;
    sold = at;
    x.push(tick / 1000);
    left.push(product.initialStock - sold);
  }
  const last = Math.min(end, Date.now()) / 1000;
  if (last > (x.at(-1) ?? 0)) {
    x.push(last);
    left.push(product.initialStock - sold);
  }
  return { x, left };
}

const PURCHASES_MAX = 20_000;

/** All purchases of a sale, read once and then only what is new. */
function usePurchases(sku: string): { purchases: Purchase[]; partial: boolean; failure: ApiFailure | null } {
  const { api } = useSession();
  const [state, setState] = useState<{ sku: string; purchases: Purchase[]; partial: boolean; failure: ApiFailure | null }>({ sku, purchases: [], partial: false, failure: null });
  useEffect(() => {
    let current = true;
    let timer: ReturnType<typeof setTimeout>;
    let done: Purchase[] = [];
    let cursor: string | null = null;
    async function read(): Promise<void> {
      try {
        let last: Purchase[] = [];
        for (;;) {
          const page: Page<Purchase> = await api.get(withQuery(`/api/v1/products/${part(sku)}/purchases`, { limit: 1000, cursor }));
          if (!current) return;
          last = page.items;
          if (page.nextCursor === null || done.length + last.length >= PURCHASES_MAX) break;
          done = [...done, ...last];
          cursor = page.nextCursor;
        }
        const purchases = [...done, ...last];
        setState({ sku, purchases, partial: purchases.length >= PURCHASES_MAX, failure: null });
      } catch (error) {
        if (current && error instanceof ApiFailure) setState((before) => ({ ...before, failure: error }));
      }
      if (current) timer = setTimeout(() => void read(), 3000);
    }
    void read();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [api, sku]);
  return state.sku === sku ? state : { purchases: [], partial: false, failure: null };
}

function OneSale({ product }: { product: Product }) {
  const { seconds, snapshot, hello } = useLive();
  const now = useNow();
  const { purchases, partial } = usePurchases(product.sku);
  const startedAt = Date.parse(hello?.startedAt ?? '') / 1000;
  const curve = useMemo(() => {
    const { x, left } = stockCurve(product, purchases, Date.now());
    return { x, lines: [{ label: 'left', values: left, color: '--accent', fill: true }] };
  }, [product, purchases]);
  const buyers = useMemo(() => {
    const { x, values } = columns(seconds, ['sale.allowed'], startedAt, 1);
    const refused = columns(seconds, ['sale.denied'], startedAt, 1).values;
    return { x, lines: [{ label: 'bought/s', values, color: '--accent', fill: true }, { label: 'refused/s', values: refused, color: '--warn' }] };
  }, [seconds, startedAt]);
  const bought = recent(seconds, 'sale.allowed', 5);
  const left = product.currentStock ?? product.initialStock;
  const opens = Date.parse(product.startTime);
  const ends = Date.parse(product.endTime);
  return (
    <Panel
      title={product.productName}
      aside={
        <>
          {stateTag(product)}
          <a href={`/sale/?sku=${part(product.sku)}`}>Sale page</a>
          <a href="/sale/admin.html">Product admin</a>
        </>
      }
    >
      <div className="figures">
        <Figure value={count(left)} words={`of ${count(product.initialStock)} left`} />
        <Figure value={short(bought.steps === 0 ? 0 : bought.sum / bought.steps)} words="buyers per second" />
        <Figure value={count(snapshot?.series['sale.streams'] ?? 0)} words="streams open" />
        <Figure value={product.state === 'UPCOMING' ? span(opens - now) : product.state === 'ACTIVE' ? span(ends - now) : time(product.endTime)} words={product.state === 'UPCOMING' ? 'until it opens' : product.state === 'ACTIVE' ? 'until it ends' : 'ended'} />
      </div>
      <div className="columns">
        <Chart x={curve.x} lines={curve.lines} height={170} stepped label={`Stock of ${product.productName}`} format={short} />
        <Chart x={buyers.x} lines={buyers.lines} height={170} label="Buyers in the last 15 minutes, of all sales on this server" />
      </div>
      {partial && <p className="note">The curve has the first {count(PURCHASES_MAX)} purchases.</p>}
    </Panel>
  );
}

export function Figure({ value, words }: { value: string; words: string }) {
  return (
    <p className="figure">
      <b>{value}</b>
      <span>{words}</span>
    </p>
  );
}

function Products({ items, chosen }: { items: Product[]; chosen: string }) {
  return (
    <Panel title="All sales">
      <Scroll label="Sales">
        <table className="grid">
          <thead>
            <tr>
              <th scope="col">SKU</th>
              <th scope="col">Product</th>
              <th scope="col">State</th>
              <th scope="col">Sold</th>
              <th scope="col">Opens</th>
              <th scope="col">Ends</th>
            </tr>
          </thead>
          <tbody>
            {items.map((product) => {
              const sold = product.initialStock - (product.currentStock ?? product.initialStock);
              return (
                <tr key={product.sku} data-chosen={product.sku === chosen || undefined}>
                  <th scope="row">
                    <button type="button" className="text-button" aria-pressed={product.sku === chosen} onClick={() => go(to('sale', product.sku))}>
                      {product.sku}
                    </button>
                  </th>
                  <td>{product.productName}</td>
                  <td>{stateTag(product)}</td>
                  <td className="nowrap">
                    <Usage used={sold} limit={product.initialStock} label={`Sold of ${product.sku}`} /> {count(sold)}/{count(product.initialStock)}
                  </td>
                  <td className="nowrap">{time(product.startTime)}</td>
                  <td className="nowrap">{time(product.endTime)}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

const PATTERNS: Record<string, string> = {
  network_spike: 'many calls of one network',
  sequential_users: 'user names in sequence',
  non_browser_agents: 'clients that are no browsers',
  many_users_one_address: 'many users of one address',
};

function Anomalies() {
  const { api } = useSession();
  const anomalies = useResource('anomalies', () => api.get<Page<Anomaly>>('/admin/sale/anomalies?limit=50'), 5000);
  if (anomalies.failure?.status === 404) {
    return (
      <Panel title="Anomalies">
        <Empty title="This version of the server does not look for anomalies." />
      </Panel>
    );
  }
  return (
    <Panel title="Anomalies">
      <Loaded resource={anomalies} what="anomalies">
        {({ items }) =>
          items.length === 0 ? (
            <Empty title="Nothing looks odd." />
          ) : (
            <Scroll label="Anomalies">
              <table className="grid">
                <thead>
                  <tr>
                    <th scope="col">What</th>
                    <th scope="col">Who</th>
                    <th scope="col">SKU</th>
                    <th scope="col" className="number">
                      Count
                    </th>
                    <th scope="col">Last</th>
                  </tr>
                </thead>
                <tbody>
                  {items.map((one) => (
                    <tr key={`${one.pattern} ${one.key} ${one.sku}`}>
                      <th scope="row">{PATTERNS[one.pattern] ?? one.pattern}</th>
                      <td>{one.key}</td>
                      <td>{one.sku ?? '–'}</td>
                      <td className="number">{count(one.count)}</td>
                      <td className="nowrap">{time(one.lastSeen)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </Scroll>
          )
        }
      </Loaded>
    </Panel>
  );
}

function Reconciliation() {
  const { api } = useSession();
  const books = useResource('sale books', () => api.get<SaleBooks>('/admin/audit'), 10_000);
  return (
    <Panel title="Sold and saved" aside={<a href="#/audit">Audit</a>}>
      <Loaded resource={books} what="the books">
        {({ sale }) => (
          <>
            <Scroll label="Sold and saved">
              <table className="grid">
                <thead>
                  <tr>
                    <th scope="col">SKU</th>
                    <th scope="col" className="number">
                      Stock
                    </th>
                    <th scope="col" className="number">
                      Sold
                    </th>
                    <th scope="col" className="number">
                      Saved
                    </th>
                    <th scope="col">Agree</th>
                  </tr>
                </thead>
                <tbody>
                  {sale.items.map((item) => (
                    <tr key={item.sku}>
                      <th scope="row">{item.sku}</th>
                      <td className="number">{count(item.initialStock)}</td>
                      <td className="number">{count(item.sold)}</td>
                      <td className="number">{count(item.persisted)}</td>
                      <td>{item.sold === item.persisted ? <Tag tone="good">yes</Tag> : <Tag tone="bad">{plural(Math.abs(item.sold - item.persisted), 'purchase')} apart</Tag>}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </Scroll>
            {sale.different.length > 0 && <Definition rows={[['Differs', sale.different.join(', ')]]} />}
          </>
        )}
      </Loaded>
    </Panel>
  );
}
