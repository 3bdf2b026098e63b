// Times as a datetime-local field holds them (local, without a zone), and back.

export function toField(ms: number): string {
  const local = new Date(ms - new Date(ms).getTimezoneOffset() * 60_000);
  return local.toISOString().slice(0, 19);
}

export function fromField(value: string): string {
  return new Date(value).toISOString();
}

/** The same instant in UTC, to compare with logs and with colleagues elsewhere; empty while it is not a time. */
export function inUtc(value: string): string {
  const ms = Date.parse(value);
  return Number.isNaN(ms) ? '' : `${new Date(ms).toISOString().slice(0, 19).replace('T', ' ')} UTC`;
}

const MINUTE = 60_000;

/** A sale to start from: in five minutes, for half an hour. */
export function suggestedTimes(now: number): { startTime: string; endTime: string } {
  const start = Math.ceil(now / MINUTE) * MINUTE + 5 * MINUTE;
  return { startTime: toField(start), endTime: toField(start + 30 * MINUTE) };
}
