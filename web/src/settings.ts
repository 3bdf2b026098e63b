// What the server says about this page, in a <meta> tag: who buyers are, and whether they have to show that they are
// people. A server that says nothing wants a name and no proof.

export type Provider = 'turnstile' | 'hcaptcha' | 'recaptcha';

export interface ChallengeSettings {
  provider: Provider;
  siteKey: string;
  /** Of the interactive challenge, where that has a key of its own. */
  interactiveSiteKey: string | null;
  scriptUrl: string;
}

export interface PageSettings {
  /** `token`: a token names the buyer, and nobody types a name. */
  identity: 'header' | 'token';
  challenge: ChallengeSettings | null;
}

export function readSettings(document: Pick<Document, 'querySelector'>): PageSettings {
  const content = document.querySelector('meta[name="weir-sale"]')?.getAttribute('content');
  return content ? (JSON.parse(content) as PageSettings) : { identity: 'header', challenge: null };
}
