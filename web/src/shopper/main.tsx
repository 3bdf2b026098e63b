// The shopper page: wires the parts together and starts them.
import { createRoot } from 'react-dom/client';
import { createApi } from '../api';
import { tabStorage, takeBuyer } from '../buyer';
import { createChallenge } from '../challenge';
import { createServerClock } from '../clock';
import { startFeed } from '../feed';
import { browserStorage, createMemory } from '../memory';
import { readSettings } from '../settings';
import '../styles/base.css';
import '../styles/shopper.css';
import { App } from './App';

const settings = readSettings(document);
const buyer = settings.identity === 'token' ? takeBuyer(location, history, tabStorage()) : null;
const clock = createServerClock();
const api = createApi(clock, undefined, buyer?.token);
const challenge = settings.challenge && createChallenge(settings.challenge, clock.local);
const memory = createMemory(browserStorage());
const feed = startFeed({ api, clock, sku: new URLSearchParams(location.search).get('sku') || null });

window.addEventListener('online', feed.wake);
window.addEventListener('pageshow', (event) => event.persisted && feed.wake());
document.addEventListener('visibilitychange', () => document.visibilityState === 'visible' && feed.wake());

const root = document.getElementById('root');
if (root) createRoot(root).render(<App {...{ api, clock, memory, feed, settings, buyer, challenge }} />);
