// Who is buying, and the button. The button is off unless the sale is active; while an attempt is on its way it keeps
// the focus and ignores presses, so that a keyboard user does not fall back to the top of the page.
import { useEffect, useId, useRef } from 'react';
import type { FormEvent, RefObject } from 'react';
import type { Buyer } from '../buyer';
import type { Challenge } from '../challenge';
import type { ServerClock } from '../clock';
import type { PurchaseState, Session } from '../purchase';
import { useSecondsLeft } from '../react';
import type { SaleView } from '../sale';
import type { PageSettings } from '../settings';
import { Notice } from './OutcomeCard';

interface BuyFormProps {
  view: SaleView;
  session: Session;
  purchase: PurchaseState;
  clock: ServerClock;
  /** Where the focus goes when the sale ends under it. */
  fallbackFocus: RefObject<HTMLElement | null>;
  settings: PageSettings;
  buyer: Buyer | null;
  challenge: Challenge | null;
}

function labelOf(view: SaleView, purchase: PurchaseState, wait: number): string {
  if (purchase.step === 'sending') return 'Buying…';
  if (purchase.step === 'challenged') return 'Waiting for you…';
  if (purchase.step === 'checking') return 'Checking your order…';
  if (view.state === 'UPCOMING') return 'Not open yet';
  if (view.state === 'ENDED') return view.endReason === 'SOLD_OUT' ? 'Sold out' : 'Sale ended';
  return wait > 0 ? `Try again in ${wait} s` : 'Buy one';
}

export function BuyForm({ view, session, purchase, clock, fallbackFocus, settings, buyer, challenge }: BuyFormProps) {
  const { outcome, step, fieldError } = purchase;
  const until = outcome?.kind === 'throttled' || outcome?.kind === 'unavailable' ? outcome.until : 0;
  const wait = useSecondsLeft(until, clock.local);
  const field = useRef<HTMLInputElement>(null);
  const id = useId();
  const busy = step !== 'ready';
  const watchFocus = useFocusFallback(view.state === 'ENDED', fallbackFocus);

  useEffect(() => {
    if (fieldError !== null) field.current?.focus();
  }, [fieldError]);

  useEffect(() => {
    if (view.state === 'ACTIVE') session.prepare();
    if (view.state === 'ENDED') session.giveUp();
  }, [view.state, session]);

  function submit(event: FormEvent): void {
    event.preventDefault();
    if (view.state === 'ACTIVE' && wait === 0) void session.buy();
  }

  if (settings.identity === 'token' && buyer === null) {
    return view.state === 'ENDED' ? null : <p className="sign-in">To buy, sign in at the shop. It brings you back here.</p>;
  }
  return (
    <form className="buy" noValidate onSubmit={submit} {...watchFocus}>
      {view.state !== 'ENDED' && buyer !== null && (
        <p className="field-hint">
          Signed in as <strong data-testid="buyer">{buyer.userId}</strong>. One unit per person.
        </p>
      )}
      {view.state !== 'ENDED' && buyer === null && (
        <div className="field">
          <label htmlFor={id}>Your e-mail address or user name</label>
          <input
            id={id}
            ref={field}
            value={purchase.userId}
            onChange={(event) => session.typed(event.target.value)}
            readOnly={busy}
            required
            autoComplete="email"
            autoCapitalize="none"
            spellCheck={false}
            inputMode="email"
            enterKeyHint="go"
            aria-invalid={fieldError !== null}
            aria-describedby={`${id}-hint${fieldError === null ? '' : ` ${id}-error`}`}
          />
          {fieldError !== null && (
            <p className="field-error" id={`${id}-error`}>
              {fieldError}
            </p>
          )}
          <p className="field-hint" id={`${id}-hint`}>
            One unit per person. Your purchase is kept under this name.
          </p>
        </div>
      )}
      <button className="primary" type="submit" disabled={view.state !== 'ACTIVE' && !busy} aria-disabled={busy || wait > 0}>
        {labelOf(view, purchase, wait)}
      </button>
      <div role="alert">
        <Notice purchase={purchase} />
      </div>
      {challenge !== null && <ChallengeBox challenge={challenge} asked={step === 'challenged'} onGiveUp={session.giveUp} />}
    </form>
  );
}

/** Where the provider draws. Its invisible challenge may draw here, too, so the place is always there. */
function ChallengeBox({ challenge, asked, onGiveUp }: { challenge: Challenge; asked: boolean; onGiveUp(): void }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    challenge.place(box.current);
    return () => challenge.place(null);
  }, [challenge]);
  useEffect(() => {
    if (asked) box.current?.scrollIntoView({ block: 'nearest' });
  }, [asked]);
  return (
    <div className="challenge" data-asked={asked}>
      <div ref={box} />
      {asked && (
        <button className="quiet" type="button" onClick={onGiveUp}>
          Cancel the order
        </button>
      )}
    </div>
  );
}

/** Moves the focus on when the control that had it goes away. */
function useFocusFallback(gone: boolean, target: RefObject<HTMLElement | null>) {
  const within = useRef(false);
  useEffect(() => {
    const focused = document.activeElement;
    const lost = focused === null || focused === document.body || focused.matches(':disabled');
    if (gone && within.current && lost) target.current?.focus();
    if (gone) within.current = false;
  }, [gone, target]);
  return {
    onFocus: () => void (within.current = true),
    onBlur: (event: { target: Element; relatedTarget: EventTarget | null }) => {
      const leaves = event.target.isConnected && !event.target.matches(':disabled');
      if (leaves && event.relatedTarget !== null) within.current = false;
    },
  };
}
