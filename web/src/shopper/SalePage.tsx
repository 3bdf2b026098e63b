// One run of a sale: the gauge, the countdown, and the shopper's own part.
import { useEffect, useRef, useState } from 'react';
import type { RefObject } from 'react';
import { holdsUnit, startSession } from '../purchase';
import { localTime, useStore, useTitle } from '../react';
import type { SaleView } from '../sale';
import type { AppProps } from './App';
import { Announcer } from './Announcer';
import { BuyForm } from './BuyForm';
import { Countdown } from './Countdown';
import { Gauge } from './Gauge';
import { OutcomeCard } from './OutcomeCard';

const FINAL = new Set(['confirmed', 'already', 'soldOut', 'notActive']);

export function stateWords(view: SaleView): string {
  if (view.state === 'UPCOMING') return 'Opens soon';
  if (view.state === 'ACTIVE') return 'On sale now';
  return view.endReason === 'SOLD_OUT' ? 'Sold out' : 'Sale ended';
}

function closingWords({ stock, initialStock }: SaleView): string {
  const sold = initialStock - stock;
  return stock === 0 ? `All ${initialStock} units have been sold.` : `${sold} of ${initialStock} units were sold.`;
}

export function SalePage({ view, typed, ...deps }: AppProps & { view: SaleView; typed: RefObject<string> }) {
  const { clock, feed } = deps;
  const [session] = useState(() => startSession({ ...deps, sale: view, userId: typed.current }));
  useEffect(() => session.stop, [session]);
  const purchase = useStore(session.state);
  typed.current = purchase.userId;
  const { outcome } = purchase;
  const eyebrow = useRef<HTMLParagraphElement>(null);
  useTitle(`${outcome?.kind === 'confirmed' ? 'You got one' : stateWords(view)} · ${view.productName}`);

  // An outcome that contradicts what is shown means that the view is old.
  useEffect(() => {
    if (outcome?.kind === 'soldOut' || outcome?.kind === 'notActive') feed.wake();
  }, [outcome, feed]);

  const final = outcome !== null && FINAL.has(outcome.kind);
  const over = final && view.state === 'ENDED';
  return (
    <main className="sale" data-state={view.state}>
      <Gauge stock={view.stock} initialStock={view.initialStock} ended={view.state === 'ENDED'} />
      <div className="panel">
        <p className="eyebrow" ref={eyebrow} tabIndex={-1} data-testid="state">
          {stateWords(view)}
        </p>
        <h1>{view.productName}</h1>
        <Countdown view={view} clock={clock} />
        {final && outcome && <OutcomeCard key={outcome.kind} outcome={outcome} view={view} clock={clock} onStartOver={deps.buyer ? null : session.startOver} />}
        {view.state === 'ENDED' && !final && <p className="closing">{closingWords(view)}</p>}
        {!over && !holdsUnit(purchase) && <BuyForm {...deps} {...{ view, session, purchase }} fallbackFocus={eyebrow} />}
        <dl className="facts">
          <div>
            <dt>Opens</dt>
            <dd>{localTime(view.startTime, clock)}</dd>
          </div>
          <div>
            <dt>Closes</dt>
            <dd>{localTime(view.endTime, clock)}</dd>
          </div>
          <div>
            <dt>Item</dt>
            <dd>{view.sku}</dd>
          </div>
        </dl>
      </div>
      <Announcer view={view} clock={clock} />
    </main>
  );
}
