// A labelled input with its hint and its problem tied to it.
import { useEffect, useId, useRef } from 'react';

interface TextFieldProps {
  label: string;
  value: string;
  onChange(value: string): void;
  type?: 'text' | 'password' | 'number' | 'datetime-local';
  problem?: string | null | undefined;
  hint?: string | undefined;
  disabled?: boolean;
  autoComplete?: string;
  /** Take the focus when a problem turns up: set on the first field that has one. */
  focusProblem?: boolean;
}

export function TextField(props: TextFieldProps) {
  const { label, value, onChange, type = 'text', problem = null, hint, disabled = false, focusProblem = true } = props;
  const id = useId();
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (problem !== null && focusProblem) field.current?.focus();
  }, [problem, focusProblem]);
  const described = [hint && `${id}-hint`, problem !== null && `${id}-problem`].filter(Boolean).join(' ');
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <input
        id={id}
        ref={field}
        type={type}
        value={value}
        onChange={(event) => onChange(event.target.value)}
        disabled={disabled}
        required
        spellCheck={false}
        autoComplete={props.autoComplete ?? 'off'}
        aria-invalid={problem !== null}
        {...(described ? { 'aria-describedby': described } : {})}
        {...(type === 'datetime-local' ? { step: 1 } : {})}
        {...(type === 'number' ? { min: 1, step: 1, inputMode: 'numeric' as const } : {})}
      />
      {problem !== null && (
        <p className="field-error" id={`${id}-problem`}>
          {problem}
        </p>
      )}
      {hint && (
        <p className="field-hint" id={`${id}-hint`}>
          {hint}
        </p>
      )}
    </div>
  );
}
