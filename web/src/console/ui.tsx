// The parts that screens are made of: panels, tables, states, meters, forms, and the question before something is changed.
import { useEffect, useId, useRef, useState } from 'react';
import type { FormEvent, ReactNode } from 'react';
import { ApiFailure } from './api';
import { percent, relative, time } from './format';
import type { Resource } from './hooks';
import { useNow, useSession } from './hooks';

export function Panel({ title, aside, children, className = '' }: { title: string; aside?: ReactNode; children: ReactNode; className?: string }) {
  const id = useId();
  return (
    <section className={`panel ${className}`} aria-labelledby={id}>
      <header className="panel-head">
        <h2 id={id}>{title}</h2>
        {aside !== undefined && <div className="panel-aside">{aside}</div>}
      </header>
      {children}
    </section>
  );
}

/** A table may be wider than a phone; then it scrolls, and the keyboard can scroll it. Its panel is the landmark. */
export function Scroll({ label, children }: { label: string; children: ReactNode }) {
  return (
    <div className="scroll" role="group" aria-label={label} tabIndex={0}>
      {children}
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <div className="empty">
      <p className="empty-title">{title}</p>
      {children}
    </div>
  );
}

export function Problem({ failure, retry }: { failure: ApiFailure; retry?: () => void }) {
  return (
    <div className="problem" role="alert">
      <p>
        {failure.message}
        {failure.status > 0 && <span className="faint"> {failure.code}</span>}
      </p>
      {retry && (
        <button type="button" className="button" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}

/** What is shown while something is loaded, when that failed, and once it is there; old data stays and says that it is old. */
export function Loaded<T>({ resource, what, children }: { resource: Resource<T>; what: string; children: (data: T) => ReactNode }) {
  const { data, failure, loading, at, reload } = resource;
  if (data === null) {
    if (failure !== null) return <Problem failure={failure} retry={reload} />;
    return loading ? <Loading what={what} /> : null;
  }
  return (
    <>
      {failure !== null && (
        <div className="stale" role="status">
          <span>
            As of {time(at)}. {failure.message}
          </span>
          <button type="button" className="button" onClick={reload}>
            Try again
          </button>
        </div>
      )}
      {children(data)}
    </>
  );
}

/** Says nothing for the first moments, so that quick answers do not flicker. */
export function Loading({ what }: { what: string }) {
  const [slow, setSlow] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setSlow(true), 250);
    return () => clearTimeout(timer);
  }, []);
  return (
    <p className="loading" role="status">
      {slow ? `Loading ${what} …` : ' '}
    </p>
  );
}

export type Tone = 'good' | 'warn' | 'bad' | 'plain' | 'info';

export function Tag({ tone = 'plain', children }: { tone?: Tone; children: ReactNode }) {
  return <span className={`tag tag-${tone}`}>{children}</span>;
}

/** How much of a limit is used. */
export function Usage({ used, limit, label }: { used: number; limit: number; label: string }) {
  const share = percent(used, limit);
  const tone = share >= 100 ? 'full' : share >= 80 ? 'near' : 'room';
  return (
    <span className="usage" role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={limit} aria-valuenow={Math.min(used, limit)} data-tone={tone}>
      <span className="usage-bar" style={{ width: `${share}%` }} />
    </span>
  );
}

/** A window that turns: how much of it is over, and when it ends. */
export function Turning({ beganAt, endsAt }: { beganAt?: number | null; endsAt: number | null }) {
  const now = useNow();
  if (endsAt === null || endsAt <= now) return <span className="faint">–</span>;
  const share = beganAt === undefined || beganAt === null ? null : percent(now - beganAt, endsAt - beganAt);
  return (
    <span className="turning">
      {share !== null && (
        <span className="turning-track" aria-hidden="true">
          <span className="turning-bar" style={{ width: `${share}%` }} />
        </span>
      )}
      <time dateTime={new Date(endsAt).toISOString()} title={time(endsAt)}>
        {relative(endsAt, now)}
      </time>
    </span>
  );
}

export function Ago({ at }: { at: string }) {
  const now = useNow();
  return (
    <time dateTime={at} title={time(at, 0)}>
      {relative(at, now)}
    </time>
  );
}

/** Lines to copy. */
export function Lines({ text, label }: { text: string; label: string }) {
  const [copied, setCopied] = useState(false);
  const { say } = useSession();
  async function copy(): Promise<void> {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      say('Copied.');
      setTimeout(() => setCopied(false), 2000);
    } catch {
      say('The browser does not allow copying. Select the lines instead.');
    }
  }
  return (
    <div className="lines">
      <pre tabIndex={0} role="region" aria-label={label}>
        {text}
      </pre>
      <button type="button" className="button" onClick={() => void copy()} aria-label={`Copy ${label}`}>
        {copied ? 'Copied' : 'Copy'}
      </button>
    </div>
  );
}

interface FieldProps {
  label: string;
  value: string;
  onChange(value: string): void;
  type?: 'text' | 'number' | 'password' | 'search' | 'datetime-local';
  hint?: string;
  placeholder?: string;
  size?: number;
  options?: readonly (string | [string, string])[];
  required?: boolean;
  autoFocus?: boolean;
}

export function Field({ label, value, onChange, type = 'text', hint, options, size, placeholder, required = false, autoFocus = false }: FieldProps) {
  const id = useId();
  const box = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (autoFocus) box.current?.focus();
  }, [autoFocus]);
  const described = hint ? { 'aria-describedby': `${id}-hint` } : {};
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      {options ? (
        <select id={id} value={value} onChange={(event) => onChange(event.target.value)} {...described}>
          {options.map((option) => {
            const [name, words] = typeof option === 'string' ? [option, option] : option;
            return (
              <option key={name} value={name}>
                {words}
              </option>
            );
          })}
        </select>
      ) : (
        <input
          ref={box}
          id={id}
          type={type}
          value={value}
          required={required}
          spellCheck={false}
          autoComplete="off"
          onChange={(event) => onChange(event.target.value)}
          {...(size ? { size } : {})}
          {...(placeholder ? { placeholder } : {})}
          {...(type === 'number' ? { min: 0, step: 1, inputMode: 'numeric' as const } : {})}
          {...(type === 'datetime-local' ? { step: 1 } : {})}
          {...described}
        />
      )}
      {hint && (
        <p className="hint" id={`${id}-hint`}>
          {hint}
        </p>
      )}
    </div>
  );
}

/** A button that changes something. A read-only token sees it and is told why it does nothing. */
export function Act({ children, onClick, tone = 'plain', type = 'button', disabled = false }: { children: ReactNode; onClick?: () => void; tone?: 'plain' | 'primary' | 'danger'; type?: 'button' | 'submit'; disabled?: boolean }) {
  const { readOnly } = useSession();
  return (
    <button
      type={type}
      className={`button button-${tone}`}
      disabled={readOnly || disabled}
      {...(readOnly ? { title: 'This token may only look (admin:read).' } : {})}
      {...(onClick ? { onClick } : {})}
    >
      {children}
    </button>
  );
}

interface ConfirmProps {
  title: string;
  children: ReactNode;
  /** What the button says: what will be done. */
  action: string;
  danger?: boolean;
  disabled?: boolean;
  run(): Promise<string>;
  onClose(): void;
}

/** Asks before something is changed. `run` gives what to say afterwards. */
export function Confirm({ title, children, action, danger = false, disabled = false, run, onClose }: ConfirmProps) {
  const { say } = useSession();
  const box = useRef<HTMLDialogElement>(null);
  const id = useId();
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState<ApiFailure | null>(null);
  useEffect(() => {
    const dialog = box.current;
    if (dialog && !dialog.open) dialog.showModal();
    return () => dialog?.close();
  }, []);

  async function submit(event: FormEvent): Promise<void> {
    event.preventDefault();
    setBusy(true);
    setFailure(null);
    try {
      say(await run());
      onClose();
    } catch (error) {
      setFailure(error instanceof ApiFailure ? error : new ApiFailure(0, 'UNKNOWN', 'That did not work.'));
      setBusy(false);
    }
  }

  return (
    <dialog ref={box} className="dialog" aria-labelledby={id} onClose={onClose}>
      <form onSubmit={(event) => void submit(event)}>
        <h2 id={id}>{title}</h2>
        <div className="dialog-body">{children}</div>
        {failure && <Problem failure={failure} />}
        <div className="dialog-actions">
          <button type="button" className="button" onClick={onClose}>
            Leave it
          </button>
          <button type="submit" className={`button ${danger ? 'button-danger' : 'button-primary'}`} disabled={busy || disabled}>
            {busy ? 'Working …' : action}
          </button>
        </div>
      </form>
    </dialog>
  );
}

export function Definition({ rows }: { rows: [string, ReactNode][] }) {
  return (
    <dl className="definition">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** One of a few views. */
export function Choice<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: readonly (readonly [NoInfer<T>, string])[]; onChange: (value: NoInfer<T>) => void }) {
  return (
    <div className="choice" role="group" aria-label={label}>
      {options.map(([name, words]) => (
        <button key={name} type="button" aria-pressed={name === value} onClick={() => onChange(name)}>
          {words}
        </button>
      ))}
    </div>
  );
}
