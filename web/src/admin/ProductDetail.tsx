// One product: its figures, its settings while they can still change, and its reset.
import { useEffect, useRef, useState } from 'react';
import type { FormEvent } from 'react';
import type { Api, ProductFields } from '../api';
import type { ServerClock } from '../clock';
import type { Product } from '../contract';
import { localTime } from '../react';
import { failureWords } from './App';
import { TextField } from './fields';
import { ProductForm } from './ProductForm';

interface DetailProps {
  api: Api;
  clock: ServerClock;
  adminKey: string;
  product: Product;
  onSaved(product: Product): void;
  onReset(words: string): void;
}

/** Only what differs: two operators who edit different fields do not undo each other. */
export function changesOf(product: Product, fields: ProductFields): Partial<ProductFields> {
  const changes: Partial<ProductFields> = {};
  if (fields.productName !== product.productName) changes.productName = fields.productName;
  if (fields.initialStock !== product.initialStock) changes.initialStock = fields.initialStock;
  // The field shows whole seconds.
  const moved = (text: string, ms: number) => Math.floor(Date.parse(text) / 1000) !== Math.floor(ms / 1000);
  if (moved(fields.startTime, product.startTime)) changes.startTime = fields.startTime;
  if (moved(fields.endTime, product.endTime)) changes.endTime = fields.endTime;
  return changes;
}

export function ProductDetail({ api, clock, adminKey, product, onSaved, onReset }: DetailProps) {
  const left = product.currentStock ?? product.initialStock;
  const sold = product.totalPurchases ?? product.initialStock - left;
  // The form is filled from the product as it was opened; later refreshes must not type over the operator.
  const [opened] = useState(product);
  const title = useRef<HTMLHeadingElement>(null);
  useEffect(() => title.current?.focus(), []);
  return (
    <section className="bench-work" aria-labelledby="detail-title">
      <h2 id="detail-title" ref={title} tabIndex={-1}>{product.productName}</h2>
      <dl className="figures">
        <Figure name="State" value={product.state} />
        <Figure name="Left" value={String(left)} />
        <Figure name="Sold" value={String(sold)} />
        <Figure name="Units" value={String(product.initialStock)} />
      </dl>
      {product.state === 'UPCOMING' ? (
        <ProductForm
          clock={clock}
          product={opened}
          save={(fields) => api.updateProduct(adminKey, product.sku, changesOf(opened, fields))}
          onSaved={onSaved}
        />
      ) : (
        <p className="fixed">
          {product.sku}: opened {localTime(product.startTime, clock)}, {product.state === 'ENDED' ? 'closed' : 'closes'}{' '}
          {localTime(product.endTime, clock)}. A sale that has started cannot be edited.
        </p>
      )}
      <p>
        <a className="quiet" href={`./?sku=${encodeURIComponent(product.sku)}`}>
          Open the shopper page
        </a>
      </p>
      <Reset {...{ api, adminKey, product, onReset }} />
    </section>
  );
}

function Figure({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Reset({ api, adminKey, product, onReset }: Pick<DetailProps, 'api' | 'adminKey' | 'product' | 'onReset'>) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [typed, setTyped] = useState('');
  const [problem, setProblem] = useState<string | null>(null);

  function ask(): void {
    setTyped('');
    setProblem(null);
    dialog.current?.showModal();
  }

  async function submit(event: FormEvent): Promise<void> {
    event.preventDefault();
    if (typed.trim() !== product.sku) return setProblem(`Type ${product.sku} to go on.`);
    const answer = await api.resetProduct(adminKey, product.sku);
    if (answer.kind !== 'ok') return setProblem(failureWords(answer));
    dialog.current?.close();
    onReset(answer.value || `${product.sku} was reset.`);
  }

  return (
    <div className="reset">
      <button className="danger" type="button" onClick={ask}>
        Reset this sale…
      </button>
      <dialog ref={dialog} aria-labelledby="reset-title">
        <form onSubmit={(event) => void submit(event)} noValidate>
          <h2 id="reset-title">Reset {product.sku}?</h2>
          <p>
            The product, its stock and {product.totalPurchases ?? 'all'} recorded purchases are deleted. This cannot be undone.
          </p>
          <TextField label={`Type ${product.sku} to confirm`} value={typed} onChange={(next) => (setTyped(next), setProblem(null))} problem={problem} />
          <div className="dialog-actions">
            <button className="danger" type="submit">
              Delete everything
            </button>
            <button className="quiet" type="button" onClick={() => dialog.current?.close()}>
              Keep it
            </button>
          </div>
        </form>
      </dialog>
    </div>
  );
}
