// The gate (admin key), then the workbench. A key the server refuses brings the gate back.
import { useState } from 'react';
import type { FormEvent } from 'react';
import type { Answer, Api } from '../api';
import type { ServerClock } from '../clock';
import { TextField } from './fields';
import type { Keyring } from './keyring';
import { Workbench } from './Workbench';

interface AppProps {
  api: Api;
  clock: ServerClock;
  keyring: Keyring;
}

/** The words for an answer that is not a value. */
export function failureWords(answer: Exclude<Answer<unknown>, { kind: 'ok' }>): string {
  return answer.kind === 'refused' ? answer.error.message : 'The server cannot be reached. Nothing is known to have changed.';
}

export function App({ api, clock, keyring }: AppProps) {
  const [key, setKey] = useState(() => keyring.load());
  const [refused, setRefused] = useState(false);

  function leave(wasRefused: boolean): void {
    keyring.forget();
    setKey(null);
    setRefused(wasRefused);
  }

  return (
    <div className="page">
      <header className="top">
        <span className="mark">weir</span>
        {key !== null && (
          <button className="quiet" type="button" onClick={() => leave(false)}>
            Forget the key
          </button>
        )}
      </header>
      {key === null ? (
        <Gate
          refused={refused}
          onKey={(given, keep) => {
            if (keep) keyring.save(given);
            setKey(given);
          }}
        />
      ) : (
        <Workbench api={api} clock={clock} adminKey={key} onRefused={() => leave(true)} />
      )}
    </div>
  );
}

function Gate({ refused, onKey }: { refused: boolean; onKey(key: string, keep: boolean): void }) {
  const [key, setKey] = useState('');
  const [keep, setKeep] = useState(false);
  const [problem, setProblem] = useState<string | null>(refused ? 'The server refused this key.' : null);

  function submit(event: FormEvent): void {
    event.preventDefault();
    const given = key.trim();
    if (given === '') setProblem('Enter the admin key.');
    else if (!/^[\x21-\x7e]+$/.test(given)) setProblem('A key holds plain characters without spaces.');
    else onKey(given, keep);
  }

  return (
    <main className="gate">
      <h1>Products</h1>
      <p className="lead">Create, edit and reset sales. The server wrote its admin key into its data directory at the first start.</p>
      <form onSubmit={submit} noValidate>
        <TextField label="Admin key" type="password" value={key} onChange={setKey} problem={problem} autoComplete="off" />
        <label className="check">
          <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.target.checked)} />
          <span>Keep it until this tab is closed</span>
        </label>
        <button className="primary" type="submit">
          Continue
        </button>
      </form>
    </main>
  );
}
