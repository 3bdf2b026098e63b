// Numbers, times and spans as operators read them.

const COUNT = new Intl.NumberFormat('en-GB');

export function count(value: number): string {
  return COUNT.format(Math.round(value));
}

/** 950, 1.2k, 34k, 5.6M: for axes and narrow cells. */
export function short(value: number): string {
  const steps: [number, string][] = [
    [1e9, 'G'],
    [1e6, 'M'],
    [1e3, 'k'],
  ];
  for (const [size, unit] of steps) {
    if (Math.abs(value) >= size) {
      const scaled = value / size;
      return `${scaled >= 100 ? Math.round(scaled) : Number(scaled.toFixed(1))}${unit}`;
    }
  }
  return String(Number(value.toFixed(value < 10 && value % 1 !== 0 ? 1 : 0)));
}

/** Microseconds as the unit that reads best. 0 means that nothing was measured. */
export function latency(micros: number): string {
  if (micros === 0) return '–';
  if (micros < 1000) return `${Math.round(micros)} µs`;
  if (micros < 1_000_000) return `${Number((micros / 1000).toPrecision(2))} ms`;
  return `${Number((micros / 1_000_000).toPrecision(2))} s`;
}

/** A span in its two largest units. */
export function span(ms: number): string {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return seconds % 60 === 0 || minutes >= 10 ? `${minutes} min` : `${minutes} min ${seconds % 60} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 === 0 ? `${hours} h` : `${hours} h ${minutes % 60} min`;
  const days = Math.floor(hours / 24);
  return hours % 24 === 0 ? `${days} d` : `${days} d ${hours % 24} h`;
}

/** An ISO 8601 duration of days and smaller units as a span, as it is otherwise. */
export function isoSpan(text: string): string {
  const ms = isoMs(text);
  return ms === null ? text : span(ms);
}

export function isoMs(text: string): number | null {
  const match = /^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?$/.exec(text);
  if (!match) return null;
  const [, days = '0', hours = '0', minutes = '0', seconds = '0'] = match;
  return (((Number(days) * 24 + Number(hours)) * 60 + Number(minutes)) * 60 + Number(seconds)) * 1000;
}

const two = (value: number) => String(value).padStart(2, '0');

/** The time of day, with the date if it is another day than `now`. Local, as operators' clocks are. */
export function time(iso: string | number | null | undefined, now = Date.now()): string {
  if (iso === null || iso === undefined) return '–';
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return '–';
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const today = new Date(now);
  if (at.toDateString() === today.toDateString()) return clock;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
}

/** How long ago, or in how long. */
export function relative(iso: string | number, now: number): string {
  const ms = new Date(iso).getTime() - now;
  return ms > 0 ? `in ${span(ms)}` : `${span(-ms)} ago`;
}

/** Sentences of the server name times in UTC; here they are the local time of day like all others. */
export function localTimes(text: string, now = Date.now()): string {
  return text.replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/g, (iso) => time(iso, now));
}

export function percent(part: number, whole: number): number {
  return whole <= 0 ? 0 : Math.min(100, Math.max(0, (part / whole) * 100));
}

const LIMITS: Record<string, string> = { quota: 'message quota', minute: 'AI calls a minute', daily: 'AI calls a day' };

/** A limit in words: a policy by its name. */
export function limitWords(name: string): string {
  return LIMITS[name] ?? `policy ${name}`;
}

export const plural = (n: number, one: string, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
