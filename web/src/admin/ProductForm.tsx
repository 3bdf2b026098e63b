// Creating and editing share their fields, checks and how the server's own objections are shown.
import { useState } from 'react';
import type { FormEvent } from 'react';
import type { Answer, ProductFields } from '../api';
import type { ServerClock } from '../clock';
import type { Product } from '../contract';
import { productProblems } from '../validation';
import type { ProductInput, ProductProblems } from '../validation';
import { failureWords } from './App';
import { TextField } from './fields';
import { fromField, inUtc, suggestedTimes, toField } from './times';

interface ProductFormProps {
  clock: ServerClock;
  /** The product being edited; none when creating. */
  product?: Product;
  save(fields: ProductFields): Promise<Answer<Product>>;
  onSaved(product: Product): void;
}

function inputOf(product: Product | undefined, now: number): ProductInput {
  if (!product) return { sku: '', productName: '', initialStock: '100', ...suggestedTimes(now) };
  return {
    sku: product.sku,
    productName: product.productName,
    initialStock: String(product.initialStock),
    startTime: toField(product.startTime),
    endTime: toField(product.endTime),
  };
}

function fieldsOf(input: ProductInput): ProductFields {
  return {
    sku: input.sku.trim(),
    productName: input.productName.trim(),
    initialStock: Number(input.initialStock),
    startTime: fromField(input.startTime),
    endTime: fromField(input.endTime),
  };
}

const ORDER = ['sku', 'productName', 'initialStock', 'startTime', 'endTime'] as const;

export function ProductForm({ clock, product, save, onSaved }: ProductFormProps) {
  const [input, setInput] = useState(() => inputOf(product, clock.now()));
  const [problems, setProblems] = useState<ProductProblems>({});
  const [failure, setFailure] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const first = ORDER.find((name) => problems[name] !== undefined);

  async function submit(event: FormEvent): Promise<void> {
    event.preventDefault();
    if (busy) return;
    const found = productProblems(input, clock.now());
    setProblems(found);
    setFailure(null);
    if (Object.keys(found).length > 0) return;
    setBusy(true);
    const answer = await save(fieldsOf(input));
    setBusy(false);
    if (answer.kind === 'ok') return onSaved(answer.value);
    const fields = answer.kind === 'refused' ? answer.error.fields : undefined;
    if (fields && ORDER.some((name) => fields[name])) setProblems(fields as ProductProblems);
    else setFailure(failureWords(answer));
  }

  const bind = (name: keyof ProductInput) => ({
    value: input[name],
    onChange: (value: string) => {
      setInput({ ...input, [name]: value });
      setProblems({ ...problems, [name]: undefined });
    },
    problem: problems[name] ?? null,
    focusProblem: name === first,
  });

  return (
    <form className="product-form" onSubmit={(event) => void submit(event)} noValidate>
      {!product && <TextField label="SKU" hint="Letters, digits and hyphens. It cannot be changed later." {...bind('sku')} />}
      <TextField label="Product name" {...bind('productName')} />
      <TextField label="Units on sale" type="number" {...bind('initialStock')} />
      <div className="pair">
        <TextField label="Opens (your time)" type="datetime-local" hint={inUtc(input.startTime)} {...bind('startTime')} />
        <TextField label="Closes (your time)" type="datetime-local" hint={inUtc(input.endTime)} {...bind('endTime')} />
      </div>
      <button className="primary" type="submit" aria-disabled={busy}>
        {busy ? 'Saving…' : product ? 'Save changes' : 'Create product'}
      </button>
      <div role="alert">{failure !== null && <p className="notice">{failure}</p>}</div>
    </form>
  );
}
