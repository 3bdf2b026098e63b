// Sign-in, the frame around the screens, and what is known of the connection.
import { Component, useCallback, useEffect, useMemo, useRef, useState } from 'react';
import type { FormEvent, ReactNode } from 'react';
import type { Api } from './api';
import { ApiFailure, createApi, credentialOf } from './api';
import { span } from './format';
import type { DemoState, Session } from './hooks';
import { createStore } from '../store';
import { SessionContext, go, to, useLive, useNow, usePlace } from './hooks';
import { createLiveFeed } from './live';
import type { LiveFeed } from './live';
import { AuditScreen } from './screens/Audit';
import { DeadLettersScreen } from './screens/DeadLetters';
import { KeyScreen } from './screens/Key';
import { NowScreen } from './screens/Now';
import { PoliciesScreen } from './screens/Policies';
import { RequestsScreen } from './screens/Requests';
import { SaleScreen } from './screens/Sale';
import { SlotsScreen } from './screens/Slots';
import { WelcomeScreen } from './screens/Welcome';

const SCREENS: [string, string, () => ReactNode][] = [
  ['now', 'Now', () => <NowScreen />],
  ['key', 'Key', () => <KeyScreen />],
  ['requests', 'Requests', () => <RequestsScreen />],
  ['dead', 'Dead letters', () => <DeadLettersScreen />],
  ['slots', 'Slots', () => <SlotsScreen />],
  ['sale', 'Sale', () => <SaleScreen />],
  ['policies', 'Policies and plans', () => <PoliciesScreen />],
  ['audit', 'Audit', () => <AuditScreen />],
  ['start', 'First steps', () => <WelcomeScreen />],
];

interface Entered {
  api: Api;
  live: LiveFeed;
}

export function App() {
  const [entered, setEntered] = useState<Entered | null>(null);
  const [said, setSaid] = useState<string | null>(null);

  const leave = useCallback((words: string | null) => {
    setSaid(words);
    setEntered((before) => {
      before?.live.stop();
      return null;
    });
  }, []);

  if (entered === null) return <SignIn said={said} onEntered={(next) => (setSaid(null), setEntered(next))} onLeft={leave} />;
  return <Console entered={entered} onLeft={leave} />;
}

/** The key is held in this page's memory alone: a reload asks for it again. */
function SignIn({ said, onEntered, onLeft }: { said: string | null; onEntered(entered: Entered): void; onLeft(words: string | null): void }) {
  const [text, setText] = useState('');
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<string | null>(said);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    document.title = 'Sign in · Weir';
    field.current?.focus();
  }, []);
  useEffect(() => {
    if (problem !== null) field.current?.focus();
  }, [problem]);

  function submit(event: FormEvent): void {
    event.preventDefault();
    if (text.trim() === '') {
      setProblem('Enter the admin key or a token.');
      return;
    }
    setBusy(true);
    setProblem(null);
    let isIn = false;
    const api = createApi(credentialOf(text), () => isIn && onLeft('The server no longer takes these credentials. Sign in again.'));
    const live = createLiveFeed(api, {
      onRefused(failure) {
        setBusy(false);
        if (isIn) onLeft(failure.message);
        else setProblem(refusedWords(failure));
      },
    });
    const stop = live.subscribe(() => {
      const { hello, link, retryAt } = live.state();
      if (hello !== null) {
        stop();
        isIn = true;
        onEntered({ api, live });
      } else if (link === 'connecting' && retryAt !== null) {
        stop();
        live.stop();
        setBusy(false);
        setProblem('The server does not answer. Is it running?');
      }
    });
  }

  return (
    <main className="signin">
      <form onSubmit={submit} noValidate>
        <h1>
          <span className="mark">Weir</span> <span className="faint">console</span>
        </h1>
        <div className="field">
          <label htmlFor="credential">Admin key or token</label>
          <input
            id="credential"
            ref={field}
            type="password"
            value={text}
            autoComplete="off"
            spellCheck={false}
            aria-invalid={problem !== null}
            aria-describedby="credential-hint credential-problem"
            onChange={(event) => setText(event.target.value)}
          />
          <p id="credential-problem" className="field-error" role="alert">
            {problem}
          </p>
        </div>
        <button type="submit" className="button button-primary" disabled={busy}>
          {busy ? 'Signing in …' : 'Sign in'}
        </button>
        <div className="hint" id="credential-hint">
          <p>
            The key is in the file <code>admin.key</code> of the server’s data directory, unless <code>WEIR_ADMIN_KEY</code> is set. To look
            without being able to change anything:
          </p>
          <pre>weir token --sub you --scope admin:read</pre>
          <p>It stays in this page’s memory: a reload asks again.</p>
        </div>
      </form>
    </main>
  );
}

function refusedWords(failure: ApiFailure): string {
  if (failure.status === 401) return 'The server does not take this key or token.';
  if (failure.status === 403) return 'This token has neither the scope admin nor admin:read.';
  return failure.message;
}

function Console({ entered, onLeft }: { entered: Entered; onLeft(words: string | null): void }) {
  const { api, live } = entered;
  const [said, setSaid] = useState<{ words: string; at: number } | null>(null);
  const say = useCallback((words: string) => setSaid({ words, at: Date.now() }), []);
  useEffect(() => {
    if (said === null) return;
    const timer = setTimeout(() => setSaid(null), 6000);
    return () => clearTimeout(timer);
  }, [said]);
  const readOnly = live.state().hello?.readOnly ?? false;
  const demo = useMemo(() => createStore<DemoState>({ progress: null, running: null }), []);
  useEffect(() => () => demo.get().running?.abort(), [demo]);
  useEffect(() => {
    if (window.location.hash === '') void isEmpty(api).then((empty) => empty && window.location.hash === '' && go('#/start'));
  }, [api]);
  const session = useMemo<Session>(() => ({ api, live, readOnly, demo, say }), [api, live, readOnly, demo, say]);
  return (
    <SessionContext value={session}>
      <a className="skip" href="#content" onClick={(event) => (event.preventDefault(), document.getElementById('content')?.focus())}>
        Skip to content
      </a>
      <div className="frame">
        <Top onLeft={() => onLeft(null)} />
        <Navigation />
        <Screen />
      </div>
      <div className="said" role="status">
        {said && <p key={said.at}>{said.words}</p>}
      </div>
    </SessionContext>
  );
}

/** Whether nobody has set anything up yet: then the first steps are of more use than empty charts. */
async function isEmpty(api: Api): Promise<boolean> {
  const lists = ['/api/config?limit=1', '/admin/policies?limit=1', '/admin/rate-limit/config?limit=1', '/admin/requests?limit=1', '/api/v1/products'];
  try {
    const found = await Promise.all(lists.map((path) => api.get<{ items: unknown[] }>(path)));
    return found.every((list) => list.items.length === 0);
  } catch {
    return false;
  }
}

function Top({ onLeft }: { onLeft(): void }) {
  const { hello } = useLive();
  return (
    <header className="top">
      <a className="mark" href="#/now">
        Weir
      </a>
      <KeySearch />
      <div className="top-right">
        <LinkState />
        {hello?.readOnly && <span className="tag tag-info">read only</span>}
        <span className="faint top-server">
          {hello?.address} · {hello?.version}
        </span>
        <button type="button" className="button" onClick={onLeft}>
          Sign out
        </button>
      </div>
    </header>
  );
}

/** The quickest way to an answer: a user or key, from anywhere. */
function KeySearch() {
  const [text, setText] = useState('');
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    function onKey(event: KeyboardEvent): void {
      const target = event.target as HTMLElement;
      if (event.key !== '/' || event.ctrlKey || event.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
      event.preventDefault();
      field.current?.focus();
    }
    window.addEventListener('keydown', onKey);
    return () => window.removeEventListener('keydown', onKey);
  }, []);
  function submit(event: FormEvent): void {
    event.preventDefault();
    if (text.trim() === '') return;
    go(to('key', text.trim()));
    setText('');
    field.current?.blur();
  }
  return (
    <form className="search" role="search" onSubmit={submit}>
      <input
        ref={field}
        type="search"
        aria-label="Look up a user or key"
        placeholder="Look up a user or key  ( / )"
        value={text}
        spellCheck={false}
        autoComplete="off"
        onChange={(event) => setText(event.target.value)}
      />
    </form>
  );
}

function LinkState() {
  const { link, heardAt, retryAt } = useLive();
  const now = useNow();
  const words = {
    connecting: 'Connecting',
    live: 'Live',
    stale: `Nothing heard for ${span(now - heardAt)}`,
    lost: retryAt !== null && retryAt > now ? `Disconnected, trying again in ${span(retryAt - now)}` : 'Disconnected, trying again',
  }[link];
  return (
    <span className="link" data-link={link}>
      <i aria-hidden="true" />
      {words}
    </span>
  );
}

function Navigation() {
  const { screen } = usePlace();
  const { snapshot } = useLive();
  const backlog = snapshot?.backlog;
  const dead = backlog ? backlog.deadRequests + Object.values(backlog.deadLetters).reduce((sum, one) => sum + one, 0) : 0;
  return (
    <nav className="nav" aria-label="Screens">
      <ul>
        {SCREENS.map(([name, words]) => (
          <li key={name}>
            <a href={to(name)} {...(name === screen ? { 'aria-current': 'page' as const } : {})}>
              {words}
              {name === 'dead' && dead > 0 && <span className="nav-count">{dead >= 10_000 ? '10k+' : dead}</span>}
            </a>
          </li>
        ))}
        <li className="nav-end">
          <a href="/docs">API</a>
        </li>
      </ul>
    </nav>
  );
}

function Screen() {
  const { screen, name } = usePlace();
  const found = SCREENS.find(([known]) => known === screen) ?? SCREENS[0];
  const [, words, draw] = found ?? ['now', 'Now', () => null];
  const { link, heardAt } = useLive();
  const now = useNow();
  const heading = useRef<HTMLElement>(null);
  useEffect(() => {
    document.title = `${name ? `${name} · ` : ''}${words} · Weir`;
    heading.current?.focus();
  }, [words, name]);
  return (
    <main className="content" id="content" tabIndex={-1} ref={heading} aria-label={words} data-screen={screen}>
      {(link === 'lost' || link === 'stale') && (
        <div className="stale" role="status">
          {link === 'lost' ? 'Not connected. ' : 'The server says nothing. '}
          What is shown is {span(now - heardAt)} old.
        </div>
      )}
      <Guard key={`${screen} ${name ?? ''}`}>{draw()}</Guard>
    </main>
  );
}

/** A screen that fails takes nothing else with it. */
class Guard extends Component<{ children: ReactNode }, { failed: boolean }> {
  override state = { failed: false };

  static getDerivedStateFromError(): { failed: boolean } {
    return { failed: true };
  }

  override render(): ReactNode {
    if (!this.state.failed) return this.props.children;
    return (
      <div className="problem" role="alert">
        <p>This screen failed. The others work.</p>
        <button type="button" className="button" onClick={() => this.setState({ failed: false })}>
          Try again
        </button>
      </div>
    );
  }
}
