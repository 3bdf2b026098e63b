// Chooses what to show: the sale, that there is none, or that nothing could be reached yet.
import { useRef } from 'react';
import type { Api } from '../api';
import type { Buyer } from '../buyer';
import type { Challenge } from '../challenge';
import type { ServerClock } from '../clock';
import type { Feed } from '../feed';
import type { Memory } from '../memory';
import { useStore, useTitle } from '../react';
import { runOf } from '../sale';
import type { PageSettings } from '../settings';
import { LinkStatus } from './LinkStatus';
import { SalePage } from './SalePage';

export interface AppProps {
  api: Api;
  clock: ServerClock;
  memory: Memory;
  feed: Feed;
  settings: PageSettings;
  /** Where tokens name buyers: who it is, if anybody has signed in. */
  buyer: Buyer | null;
  challenge: Challenge | null;
}

export function App(props: AppProps) {
  const { phase, view, link } = useStore(props.feed.state);
  const typed = useRef('');
  return (
    <div className="page">
      <header className="top">
        <span className="mark">weir</span>
        <LinkStatus link={link} />
      </header>
      {phase === 'sale' && view ? (
        <SalePage key={runOf(view)} view={view} typed={typed} {...props} />
      ) : (
        <Blank none={phase === 'none'} offline={link === 'offline'} />
      )}
    </div>
  );
}

function Blank({ none, offline }: { none: boolean; offline: boolean }) {
  useTitle(none ? 'No sale · Weir' : 'Sale · Weir');
  if (none) {
    return (
      <main className="blank">
        <h1>No sale is planned</h1>
        <p role="status">This page fills in by itself as soon as one is.</p>
      </main>
    );
  }
  return (
    <main className="blank">
      <h1>{offline ? 'The shop cannot be reached' : 'Looking up the sale'}</h1>
      <p role="status">{offline ? 'Trying again every two seconds; no need to reload.' : 'One moment.'}</p>
    </main>
  );
}
