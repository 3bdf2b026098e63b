// The time to the next turn of the sale, on the server's clock.
import type { ServerClock } from '../clock';
import { partsOf, spoken } from '../countdown';
import { useSecondsLeft } from '../react';
import type { SaleView } from '../sale';

export function Countdown({ view, clock }: { view: SaleView; clock: ServerClock }) {
  const target = view.state === 'UPCOMING' ? view.startTime : view.endTime;
  const left = useSecondsLeft(target, clock.now);
  if (view.state === 'ENDED') return null;
  const opening = view.state === 'UPCOMING';
  const label = opening ? 'Opens in' : 'Closes in';
  if (left === 0) return <p className="countdown-due">{opening ? 'Opening…' : 'Closing…'}</p>;
  const parts = partsOf(left);
  const units = [
    ...(parts.days > 0 ? [[parts.days, 'days'] as const] : []),
    ...(left >= 3600 ? [[parts.hours, 'hours'] as const] : []),
    [parts.minutes, 'min'] as const,
    [parts.seconds, 'sec'] as const,
  ];
  return (
    <div className="countdown" role="timer" aria-label={`${label} ${spoken(left)}`} data-seconds={left}>
      <span className="countdown-label">{label}</span>
      <span className="countdown-digits" aria-hidden="true">
        {units.map(([value, unit]) => (
          <span className="countdown-part" key={unit}>
            <b>{String(value).padStart(2, '0')}</b>
            <i>{unit}</i>
          </span>
        ))}
      </span>
    </div>
  );
}
