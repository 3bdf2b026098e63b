// The server's clock, as seen from here. The device's clock may be wrong by hours, so the countdown runs on the device's
// monotonic clock plus an offset learnt from `Date` headers. A header says the time to the second and the answer took a
// while to travel, so each sample bounds the offset from both sides; samples together narrow it to well under a second.

export interface Offset {
  /** Milliseconds to add to the local clock; the truth lies between. */
  low: number;
  high: number;
}

export interface Sample {
  /** Local clock when the request left and when its answer came. */
  sentAt: number;
  receivedAt: number;
  /** The `Date` header in epoch milliseconds, and the `Age` header in milliseconds (0 when it came from the origin). */
  date: number;
  age: number;
}

const SECOND = 1000;

export function boundsOf(sample: Sample): Offset {
  const low = sample.date + sample.age;
  const high = low + SECOND + (sample.age > 0 ? SECOND : 0);
  return { low: low - sample.receivedAt, high: high - sample.sentAt };
}

/** Where the two contradict each other, the newer one is right: the device slept, or another server answered. */
export function narrow(known: Offset | null, sample: Sample): Offset {
  const fresh = boundsOf(sample);
  if (known === null) return fresh;
  const both = { low: Math.max(known.low, fresh.low), high: Math.min(known.high, fresh.high) };
  return both.low <= both.high ? both : fresh;
}

export function middle(offset: Offset): number {
  return (offset.low + offset.high) / 2;
}

export interface ServerClock {
  /** The server's time in epoch milliseconds; the device's own until a first sample is in. */
  now(): number;
  observe(response: Response, sentAt: number): void;
  local(): number;
}

export function createServerClock(local: () => number = () => performance.now(), device: () => number = () => Date.now()): ServerClock {
  let offset: Offset | null = null;
  const assumed = device() - local();
  return {
    local,
    now: () => local() + (offset === null ? assumed : middle(offset)),
    observe(response, sentAt) {
      const date = Date.parse(response.headers.get('date') ?? '');
      if (Number.isNaN(date)) return;
      const age = Number(response.headers.get('age') ?? 0) * SECOND || 0;
      offset = narrow(offset, { sentAt, receivedAt: local(), date, age });
    },
  };
}
