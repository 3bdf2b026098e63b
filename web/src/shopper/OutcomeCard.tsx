// What came of an attempt. The four outcomes that end it are cards which take the focus; what can be tried again is a
// notice by the button.
import { useEffect, useRef } from 'react';
import type { ReactNode } from 'react';
import type { ServerClock } from '../clock';
import type { Purchase } from '../contract';
import type { Outcome, PurchaseState } from '../purchase';
import { localTime } from '../react';
import type { SaleView } from '../sale';

interface CardProps {
  outcome: Outcome;
  view: SaleView;
  clock: ServerClock;
  onStartOver: (() => void) | null;
}

type Kind = 'confirmed' | 'already' | 'soldOut' | 'notActive';

const ICONS: Record<Kind, string> = {
  confirmed: 'M5 12.5l4.5 4.5L19 7.5',
  already: 'M3 13l4 4 8-9M11 16l1 1 8-9',
  soldOut: 'M6 18L18 6',
  notActive: 'M12 6v6l4 3',
};

function Card({ kind, title, quiet, children }: { kind: Kind; title: string; quiet: boolean; children: ReactNode }) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    if (!quiet) heading.current?.focus();
  }, [quiet]);
  return (
    <section className="outcome" data-outcome={kind} aria-labelledby="outcome-title">
      <svg className="outcome-icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
        {kind !== 'confirmed' && kind !== 'already' && <circle cx="12" cy="12" r="9.5" />}
        <path d={ICONS[kind]} />
      </svg>
      <div className="outcome-text">
        <h2 id="outcome-title" ref={heading} tabIndex={-1}>
          {title}
        </h2>
        {children}
      </div>
    </section>
  );
}

function Ticket({ purchase, clock }: { purchase: Purchase; clock: ServerClock }) {
  const at = Date.parse(purchase.purchasedAt);
  return (
    <dl className="ticket">
      <div>
        <dt>Purchase number</dt>
        <dd data-testid="purchase-no">{purchase.purchaseNo}</dd>
      </div>
      {!Number.isNaN(at) && (
        <div>
          <dt>Bought</dt>
          <dd>{localTime(at, clock)}</dd>
        </div>
      )}
    </dl>
  );
}

function NotYou({ onStartOver }: { onStartOver(): void }) {
  return (
    <button className="quiet" type="button" onClick={onStartOver}>
      Not you? Use another name
    </button>
  );
}

export function OutcomeCard({ outcome, view, clock, onStartOver }: CardProps) {
  // A late attempt in a sold-out sale may be answered either way; to the shopper it is one thing.
  const kind = outcome.kind === 'notActive' && view.endReason === 'SOLD_OUT' ? 'soldOut' : outcome.kind;
  if (outcome.kind === 'confirmed') {
    return (
      <Card kind="confirmed" title="You got one" quiet={outcome.restored}>
        <p>One unit is reserved for you. Keep this number.</p>
        <Ticket purchase={outcome.purchase} clock={clock} />
        {outcome.restored && onStartOver && <NotYou onStartOver={onStartOver} />}
      </Card>
    );
  }
  if (outcome.kind === 'already') {
    return (
      <Card kind="already" title="You already have one" quiet={false}>
        <p>It is one unit per person, and your earlier purchase stands.</p>
        {outcome.purchase && <Ticket purchase={outcome.purchase} clock={clock} />}
        {onStartOver && <NotYou onStartOver={onStartOver} />}
      </Card>
    );
  }
  if (kind === 'soldOut') {
    return (
      <Card kind="soldOut" title="Sold out" quiet={false}>
        <p>The last unit went before your order arrived. Nothing was bought.</p>
      </Card>
    );
  }
  const over = view.state === 'ENDED';
  return (
    <Card kind="notActive" title={over ? 'The sale is over' : 'The sale is not open'} quiet={false}>
      <p>{over ? 'Your order arrived after it closed. Nothing was bought.' : 'Your order came before it opened. Nothing was bought.'}</p>
    </Card>
  );
}

/** What can be tried again, and what is still being found out. */
export function Notice({ purchase: { step, outcome } }: { purchase: PurchaseState }) {
  if (step === 'checking') {
    return <Line kind="checking" title="The connection failed on the way.">Asking the shop whether your order arrived. Please wait.</Line>;
  }
  if (step === 'challenged') {
    return <Line kind="challenged" title="One more step.">Show that you are a person, and your order goes out by itself.</Line>;
  }
  switch (outcome?.kind) {
    case 'unproven':
      return <Line kind="unproven" title="We could not check that you are a person.">Nothing was bought. If you block scripts, allow them for this page, then try again.</Line>;
    case 'signedOut':
      return <Line kind="signedOut" title="You are not signed in any more.">Nothing was bought. Sign in at the shop again.</Line>;
    case 'throttled':
      return <Line kind="throttled" title="Too many attempts.">This one was not taken. Wait a moment, then try again.</Line>;
    case 'unavailable':
      return <Line kind="unavailable" title="The shop is overloaded.">Nothing was bought. You can try again.</Line>;
    case 'lost':
      return <Line kind="lost" title="Your order did not arrive.">Nothing was bought. You can try again.</Line>;
    case 'rejected':
      return <Line kind="rejected" title="The shop refused the order.">{outcome.message}</Line>;
    default:
      return null;
  }
}

function Line({ kind, title, children }: { kind: string; title: string; children: ReactNode }) {
  return (
    <p className="notice" data-notice={kind}>
      <strong>{title}</strong> {children}
    </p>
  );
}
