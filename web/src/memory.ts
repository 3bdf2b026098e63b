// What this browser remembers of a purchase, so that a reload shows it again and an attempt cut off by a reload is
// followed up. Without storage (blocked, full) the page works and forgets.
import type { Purchase } from './contract';

export interface Remembered {
  sku: string;
  /** Which run of the sale (`runOf`): a reset sale starts from nothing. */
  run: string;
  userId: string;
  /** Device time at which an attempt left that has not been answered. */
  sentAt: number | null;
  purchase: Purchase | null;
}

export interface Memory {
  load(sku: string): Remembered | null;
  save(record: Remembered): void;
  forget(sku: string): void;
  /** Calls back when another tab changed something. */
  watch(listener: () => void): () => void;
}

const KEY = 'weir.sale';
const KEPT = 20;

function isRecord(value: unknown): value is Remembered {
  const record = value as Remembered | null;
  return typeof record?.sku === 'string' && typeof record.run === 'string' && typeof record.userId === 'string';
}

export function createMemory(storage: Storage | null): Memory {
  let fallback: Remembered[] = [];

  function all(): Remembered[] {
    try {
      const parsed: unknown = JSON.parse(storage?.getItem(KEY) ?? '[]');
      return storage && Array.isArray(parsed) ? parsed.filter(isRecord) : fallback;
    } catch {
      return fallback;
    }
  }

  function write(records: Remembered[]): void {
    fallback = records.slice(-KEPT);
    try {
      storage?.setItem(KEY, JSON.stringify(fallback));
    } catch {
      // Full or forbidden: `fallback` holds it for as long as the page lives.
    }
  }

  return {
    load: (sku) => all().findLast((record) => record.sku === sku) ?? null,
    save: (record) => write([...all().filter((other) => other.sku !== record.sku), record]),
    forget: (sku) => write(all().filter((record) => record.sku !== sku)),
    watch(listener) {
      const onStorage = (event: StorageEvent) => event.key === KEY && listener();
      window.addEventListener('storage', onStorage);
      return () => window.removeEventListener('storage', onStorage);
    },
  };
}

export function browserStorage(): Storage | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
