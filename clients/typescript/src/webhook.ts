// Verifies webhooks, signed as Standard Webhooks says. Web Crypto compares in constant time.

/** The webhook is not from the server, or too old. Answer 401 and do not look at the body. */
export class WebhookError extends Error {
  override readonly name = 'WebhookError';
}

export interface Webhook<T = unknown> {
  /** The same each time a webhook is sent: tells repetitions. */
  id: string;
  sentAt: Date;
  payload: T;
}
export interface WebhookOptions {
  toleranceMs?: number;
  now?: Date;
}

/** `secret` is `whsec_…`; several, separated by spaces, while they are rotated. `body` is the body byte for byte. */
export async function verifyWebhook<T = unknown>(
  secret: string,
  headers: Headers | Record<string, string | string[] | undefined>,
  body: string | Uint8Array<ArrayBuffer>,
  { toleranceMs = 300_000, now = new Date() }: WebhookOptions = {},
): Promise<Webhook<T>> {
  const find = (name: string) => {
    const value = headers instanceof Headers ? headers.get(name) : headers[name];
    if (typeof value !== 'string' || value === '') throw new WebhookError(`the header ${name} is missing`);
    return value;
  };
  const id = find('webhook-id');
  const timestamp = find('webhook-timestamp');
  const signatures = find('webhook-signature').split(' ').filter((part) => part.startsWith('v1,'));
  const sentAt = new Date(Number(/^\d{1,12}$/.test(timestamp) ? timestamp : NaN) * 1000);
  if (!(Math.abs(now.getTime() - sentAt.getTime()) <= toleranceMs)) throw new WebhookError('webhook-timestamp is not of this time');

  const bytes = typeof body === 'string' ? new TextEncoder().encode(body) : body;
  const head = new TextEncoder().encode(`${id}.${timestamp}.`);
  const signed = new Uint8Array(head.length + bytes.length);
  signed.set(head);
  signed.set(bytes, head.length);
  const algorithm = { name: 'HMAC', hash: 'SHA-256' };
  for (const text of secret.split(/\s+/).filter((text) => text !== '')) {
    const raw = decode(text.replace(/^whsec_/, ''));
    if (raw === undefined || raw.length === 0) throw new TypeError('a webhook secret is "whsec_" and base64');
    const key = await crypto.subtle.importKey('raw', raw, algorithm, false, ['verify']);
    for (const signature of signatures) {
      const mac = decode(signature.slice(3));
      if (mac !== undefined && (await crypto.subtle.verify(algorithm, key, mac, signed))) {
        return { id, sentAt, payload: JSON.parse(new TextDecoder().decode(bytes)) as T };
      }
    }
  }
  throw new WebhookError('no signature is right');
}

function decode(base64: string): Uint8Array<ArrayBuffer> | undefined {
  try {
    return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  } catch {
    return undefined;
  }
}
