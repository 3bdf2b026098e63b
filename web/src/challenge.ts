// Shows to the server that the shopper is a person, through Turnstile, hCaptcha or reCAPTCHA. The invisible challenge is
// begun before the shopper presses the button, so that an order does not wait for it; the interactive one appears only
// when the server asks for it. Every token is good for one order, and for a short time.
import type { ChallengeSettings, Provider } from './settings';

export type ChallengeKind = 'invisible' | 'interactive';

export interface Proof {
  token: string;
  kind: ChallengeKind;
}

export interface Challenge {
  /** Where the provider draws. */
  place(element: HTMLElement | null): void;
  /** Begins an invisible challenge, unless one is under way or its token is still good. */
  prepare(): void;
  /**
   * Calls `asked` when the shopper has to solve something although the invisible challenge was wanted. Rejects with
   * `Unproven` when the provider cannot be asked, or the attempt was aborted.
   */
  prove(kind: ChallengeKind, signal: AbortSignal, asked: () => void): Promise<Proof>;
}

/** The provider did not give a token. */
export class Unproven extends Error {}

/** What the three scripts have in common. */
interface Widgets {
  render(element: HTMLElement, options: Record<string, unknown>): unknown;
  execute(widget: unknown, options?: object): unknown;
  remove?(widget: unknown): void;
  ready?(callback: () => void): void;
}

interface Ready {
  proof: Promise<Proof>;
  since: number;
}

/** Tokens are good for two minutes or more. */
const FRESH_MS = 100_000;
/** Far longer than an invisible challenge takes. Then the interactive one is tried. */
const INVISIBLE_MS = 8_000;
const SCRIPT_MS = 10_000;
const NAMES: Record<Provider, string> = { turnstile: 'turnstile', hcaptcha: 'hcaptcha', recaptcha: 'grecaptcha' };

function loadScript(url: string): Promise<void> {
  return new Promise((loaded, failed) => {
    const script = document.createElement('script');
    const give = (up: () => void) => () => {
      clearTimeout(timer);
      up();
    };
    const fail = () => {
      script.remove();
      failed(new Unproven('the script of the provider did not load'));
    };
    const timer = setTimeout(fail, SCRIPT_MS);
    script.addEventListener('load', give(loaded));
    script.addEventListener('error', give(fail));
    script.src = url;
    document.head.append(script);
  });
}

/** Some scripts draw only after they have called back. */
async function whenReady(provider: Provider): Promise<Widgets> {
  const widgets = (window as unknown as Record<string, Widgets | undefined>)[NAMES[provider]];
  if (widgets === undefined) throw new Unproven('the script of the provider is not what it should be');
  // Turnstile's `ready` refuses to be called after a script that was loaded like this one.
  if (provider === 'recaptcha') await new Promise<void>((ready) => (widgets.ready ? widgets.ready(ready) : ready()));
  return widgets;
}

/** What a provider is asked to draw. Turnstile's invisible challenge may still ask for a click, hCaptcha's for pictures. */
function options(provider: Provider, kind: ChallengeKind): Record<string, unknown> {
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const theme = dark ? 'dark' : 'light';
  if (provider === 'turnstile') {
    const shown = kind === 'invisible' ? 'interaction-only' : 'always';
    return { action: 'purchase', appearance: shown, execution: 'execute', theme, size: 'flexible', retry: 'never' };
  }
  if (kind === 'invisible') return { size: 'invisible', badge: 'inline', theme };
  return { size: innerWidth < 360 ? 'compact' : 'normal', theme };
}

export function createChallenge(settings: ChallengeSettings, now: () => number): Challenge {
  const { provider, siteKey, interactiveSiteKey, scriptUrl } = settings;
  let host: HTMLElement | null = null;
  let script: Promise<Widgets> | null = null;
  let ready: Ready | null = null;

  function widgets(): Promise<Widgets> {
    script ??= loadScript(scriptUrl)
      .then(() => whenReady(provider))
      .catch((problem: unknown) => {
        // The next attempt loads it again.
        script = null;
        throw problem;
      });
    return script;
  }

  async function ask(kind: ChallengeKind, signal?: AbortSignal): Promise<Proof> {
    const api = await widgets();
    const element = document.createElement('div');
    (host ?? document.body).append(element);
    let widget: unknown;
    try {
      const token = await new Promise<string>((solved, failed) => {
        const fail = (why: string) => () => failed(new Unproven(why));
        const closed = kind === 'invisible' ? { 'close-callback': fail('closed') } : {};
        signal?.addEventListener('abort', fail('aborted'));
        if (signal?.aborted) return fail('aborted')();
        if (kind === 'invisible') setTimeout(fail('no answer'), INVISIBLE_MS);
        const key = kind === 'interactive' ? (interactiveSiteKey ?? siteKey) : siteKey;
        const callbacks = { callback: solved, 'error-callback': fail('an error of the provider'), ...closed };
        widget = api.render(element, { sitekey: key, ...options(provider, kind), ...callbacks });
        // Checkboxes of hCaptcha and reCAPTCHA wait for a click; reCAPTCHA's scores come as a promise.
        if (kind === 'interactive' && provider !== 'turnstile') return;
        const given = api.execute(widget, provider === 'recaptcha' ? { action: 'purchase' } : undefined);
        void Promise.resolve(given).then((token) => typeof token === 'string' && solved(token), fail('refused'));
      });
      return { token, kind };
    } catch (problem) {
      throw problem instanceof Unproven ? problem : new Unproven(String(problem));
    } finally {
      api.remove?.(widget);
      element.remove();
    }
  }

  function begin(): Ready {
    const begun = { proof: ask('invisible'), since: now() };
    begun.proof.catch(() => ready === begun && (ready = null));
    return begun;
  }

  return {
    place: (element) => void (host = element),
    prepare() {
      if (ready !== null && now() - ready.since < FRESH_MS) return;
      // hCaptcha may cover the page with pictures, which must not happen before the shopper has done anything.
      if (provider === 'hcaptcha') void widgets().catch(() => {});
      else ready = begin();
    },
    async prove(kind, signal, asked) {
      if (kind === 'interactive') return ask(kind, signal);
      const fresh = ready !== null && now() - ready.since < FRESH_MS ? ready : begin();
      ready = null;
      try {
        return await fresh.proof;
      } catch {
        // What could not be seen without the shopper is asked of the shopper. A script that does not load fails again.
        await widgets();
        asked();
        return ask('interactive', signal);
      }
    },
  };
}
