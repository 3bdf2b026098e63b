// The products on one side, the one being worked on at the other. Figures are fetched again every few seconds while
// somebody looks. A server that cannot list is worked with by SKU.
import { useCallback, useEffect, useState } from 'react';
import type { FormEvent } from 'react';
import type { Api } from '../api';
import type { ServerClock } from '../clock';
import type { Product } from '../contract';
import { skuProblem } from '../validation';
import { failureWords } from './App';
import { TextField } from './fields';
import { ProductDetail } from './ProductDetail';
import { ProductForm } from './ProductForm';

interface WorkbenchProps {
  api: Api;
  clock: ServerClock;
  adminKey: string;
  onRefused(): void;
}

const REFRESH_MS = 3000;

/** The list, or the products opened so far where the server has no list. */
function useProducts({ api, adminKey, onRefused }: WorkbenchProps) {
  const [products, setProducts] = useState<Product[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  const [listed, setListed] = useState(true);

  const refresh = useCallback(async () => {
    const answer = await api.products(adminKey);
    if (answer.kind === 'ok') {
      setProducts(answer.value);
      setProblem(null);
      return;
    }
    if (answer.kind === 'refused' && answer.status === 401) return onRefused();
    const cannotList = answer.kind === 'refused' && (answer.status === 404 || answer.status === 405);
    if (cannotList) setListed(false);
    setProblem(cannotList ? null : failureWords(answer));
  }, [api, adminKey, onRefused]);

  const put = useCallback((product: Product) => {
    setProducts((all) => [...all.filter((other) => other.sku !== product.sku), product]);
  }, []);

  useEffect(() => {
    void refresh();
    if (!listed) return;
    const timer = setInterval(() => document.visibilityState === 'visible' && void refresh(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [refresh, listed]);

  return { products, problem, listed, refresh, put, drop: (sku: string) => setProducts((all) => all.filter((p) => p.sku !== sku)) };
}

export function Workbench(props: WorkbenchProps) {
  const { api, clock, adminKey } = props;
  const { products, problem, listed, refresh, put, drop } = useProducts(props);
  const [open, setOpen] = useState<string | null>(null);
  const [said, setSaid] = useState('');
  const product = products.find((one) => one.sku === open) ?? null;

  function changed(next: Product, words: string): void {
    put(next);
    setOpen(next.sku);
    setSaid(words);
    void refresh();
  }

  return (
    <main className="bench">
      <div className="bench-head">
        <h1>Products</h1>
        <button className="primary" type="button" onClick={() => setOpen(null)} aria-pressed={open === null}>
          New product
        </button>
      </div>
      <div role="status" className="said">
        {problem !== null ? <p className="notice">{problem}</p> : said && <p className="notice">{said}</p>}
      </div>
      <nav className="bench-list" aria-label="Products">
        {listed ? null : <OpenBySku api={api} adminKey={adminKey} onFound={(found) => changed(found, '')} />}
        <ProductList products={products} open={open} onOpen={(sku) => (setOpen(sku), setSaid(''))} />
      </nav>
      {product === null ? (
        <section className="bench-work" aria-label="New product">
          <h2>New product</h2>
          <ProductForm
            clock={clock}
            save={(fields) => api.createProduct(adminKey, fields)}
            onSaved={(created) => changed(created, `${created.sku} was created.`)}
          />
        </section>
      ) : (
        <ProductDetail
          key={product.sku}
          {...{ api, clock, adminKey, product }}
          onSaved={(saved) => changed({ ...product, ...saved }, `${saved.sku} was saved.`)}
          onReset={(words) => {
            drop(product.sku);
            setOpen(null);
            setSaid(words);
          }}
        />
      )}
    </main>
  );
}

function ProductList({ products, open, onOpen }: { products: Product[]; open: string | null; onOpen(sku: string): void }) {
  if (products.length === 0) return <p className="field-hint">Nothing here yet.</p>;
  const byStart = [...products].sort((a, b) => b.startTime - a.startTime);
  return (
    <ul>
      {byStart.map((product) => (
        <li key={product.sku}>
          <button type="button" aria-current={product.sku === open} onClick={() => onOpen(product.sku)}>
            <strong>{product.productName}</strong>
            <span>{product.sku}</span>
            <span className="tag" data-state={product.state}>
              {product.state}
            </span>
            <span className="bench-figure">
              {product.currentStock ?? product.initialStock} / {product.initialStock}
            </span>
          </button>
        </li>
      ))}
    </ul>
  );
}

function OpenBySku({ api, adminKey, onFound }: { api: Api; adminKey: string; onFound(product: Product): void }) {
  const [sku, setSku] = useState('');
  const [problem, setProblem] = useState<string | null>(null);

  async function submit(event: FormEvent): Promise<void> {
    event.preventDefault();
    const wrong = skuProblem(sku);
    if (wrong !== null) return setProblem(wrong);
    const answer = await api.product(adminKey, sku.trim());
    if (answer.kind === 'ok') onFound(answer.value);
    else setProblem(failureWords(answer));
  }

  return (
    <form className="open-by-sku" onSubmit={(event) => void submit(event)} noValidate>
      <TextField label="Open by SKU" value={sku} onChange={(next) => (setSku(next), setProblem(null))} problem={problem} />
    </form>
  );
}
