// Durations on screen and in speech. Pure: the caller brings the time.

const SECOND = 1000;

export interface Parts {
  days: number;
  hours: number;
  minutes: number;
  seconds: number;
}

/** Whole seconds still to wait, rounded up, so that "0" is only shown when the time has come. */
export function secondsLeft(target: number, now: number): number {
  return Math.max(0, Math.ceil((target - now) / SECOND));
}

export function partsOf(seconds: number): Parts {
  return {
    days: Math.floor(seconds / 86_400),
    hours: Math.floor(seconds / 3600) % 24,
    minutes: Math.floor(seconds / 60) % 60,
    seconds: seconds % 60,
  };
}

/** Milliseconds until the shown second changes; at least one, so that a timer never spins. */
export function untilNextSecond(target: number, now: number): number {
  const left = target - now;
  if (left <= 0) return SECOND;
  return Math.max(1, Math.ceil(left - (secondsLeft(target, now) - 1) * SECOND));
}

/** `1:02:03`, `02:03`, `2 d 01:02:03`: for a button or a title. */
export function short(seconds: number): string {
  const { days, hours, minutes, seconds: rest } = partsOf(seconds);
  const two = (n: number) => String(n).padStart(2, '0');
  const clock = `${two(minutes)}:${two(rest)}`;
  if (days > 0) return `${days} d ${two(hours)}:${clock}`;
  return hours > 0 ? `${hours}:${clock}` : clock;
}

/** `2 days 1 hour`, `5 minutes 1 second`: the two largest units, as one would say it. */
export function spoken(seconds: number): string {
  const parts = partsOf(seconds);
  const words = (['days', 'hours', 'minutes', 'seconds'] as const)
    .filter((unit) => parts[unit] > 0)
    .map((unit) => `${parts[unit]} ${parts[unit] === 1 ? unit.slice(0, -1) : unit}`);
  return words.slice(0, 2).join(' ') || '0 seconds';
}

const MARKS = [3600, 1800, 600, 300, 60, 30, 10];

/** The mark that was passed between two looks at the countdown, if one was: the moments worth saying aloud. */
export function markPassed(before: number, after: number): number | null {
  return MARKS.findLast((mark) => before > mark && after <= mark) ?? null;
}
