// A stand-in for the providers of challenges: the script that a page loads, the frame that it draws, and the verifier that
// the server asks. A test says what the invisible challenge finds (`score`), whether it finds anything, and reads what
// was verified. As with the real ones, a token is good once.
import { createServer } from 'node:http';

const GLOBALS = /** @type {Record<string, string>} */ ({ turnstile: 'turnstile', hcaptcha: 'hcaptcha', recaptcha: 'grecaptcha' });

/** The script of a provider. It keeps to the provider's own rules: what is drawn at once, what waits for `execute`. */
const script = (/** @type {string} */ provider, /** @type {string} */ origin) => `(() => {
  const widgets = new Map();
  const begin = (id) => {
    const { frame, kind, key } = widgets.get(id);
    frame.src = ${JSON.stringify(origin)} + '/frame?' + new URLSearchParams({ id, kind, key });
  };
  addEventListener('message', ({ data, origin }) => {
    if (origin !== ${JSON.stringify(origin)}) return;
    const { options, frame } = widgets.get(data.id) ?? {};
    if (data.click && frame) Object.assign(frame.style, { width: '300px', height: '74px' });
    else if (data.token) options?.callback(data.token);
    else options?.['error-callback']();
  });
  window.${GLOBALS[provider]} = {
    render(element, options) {
      const id = String(widgets.size + 1);
      const frame = document.createElement('iframe');
      const hidden = options.size === 'invisible' || options.appearance === 'interaction-only';
      frame.title = 'Challenge';
      Object.assign(frame.style, { border: '0', width: '0', height: '0' });
      element.append(frame);
      widgets.set(id, { frame, options, kind: hidden ? 'invisible' : 'interactive', key: options.sitekey });
      if (options.size === 'normal' || options.size === 'compact') begin(id);
      return id;
    },
    execute: begin,
    remove: (id) => widgets.delete(id),
    ready: (callback) => setTimeout(callback),
  };
})();`;

/** The frame: a token at once, or after a click. */
const frame = (/** @type {object} */ answer, /** @type {boolean} */ click) => `<!doctype html>
<meta charset="utf-8"><title>Challenge</title>
<style>body { margin: 0; font: 16px sans-serif } label { display: flex; gap: 12px; align-items: center; box-sizing: border-box;
  width: 300px; height: 74px; padding: 0 16px; border: 1px solid #6b7f82; background: #fff; color: #0e2226 } input { width: 28px; height: 28px }</style>
${click ? '<label><input type="checkbox"> I am a person</label>' : ''}
<script>
  const say = () => parent.postMessage(${JSON.stringify(answer)}, '*');
  if (${click}) { parent.postMessage({ ...${JSON.stringify(answer)}, click: true }, '*'); document.querySelector('input').onchange = say; }
  else say();
</script>`;

/** @param {{ secret: string, interactiveSecret?: string }} options */
export function createProvider({ secret, interactiveSecret = secret }) {
  /** @type {Map<string, { kind: string, key: string, score?: number }>} */
  const tokens = new Map();
  let made = 0;
  const provider = {
    url: '',
    /** What the invisible challenge finds; without a score it says yes or no alone. */
    score: /** @type {number | undefined} */ (0.9),
    /** Whether the invisible challenge gives a token, and the script is there at all. */
    invisible: true,
    reachable: true,
    /** The tokens that the verifier accepted. */
    verified: /** @type {{ kind: string, key: string }[]} */ ([]),
    listen: () => new Promise((resolve) => server.listen(0, '127.0.0.1', () => {
      const address = server.address();
      provider.url = `http://127.0.0.1:${typeof address === 'object' ? address?.port : 0}`;
      resolve(undefined);
    })),
    close() {
      server.close();
      server.closeAllConnections();
    },
  };

  /** @param {URL} url */
  function draw(url) {
    const [id, kind, key] = ['id', 'kind', 'key'].map((name) => url.searchParams.get(name) ?? '');
    if (kind === 'invisible' && !provider.invisible) return frame({ id }, false);
    const token = `token-${(made += 1)}`;
    const found = kind === 'invisible' && provider.score !== undefined ? { score: provider.score } : {};
    tokens.set(token, { kind: kind ?? '', key: key ?? '', ...found });
    return frame({ id, token }, kind === 'interactive');
  }

  /** @param {URLSearchParams} form */
  function verify(form) {
    const known = tokens.get(form.get('response') ?? '');
    const own = known?.kind === 'interactive' ? interactiveSecret : secret;
    tokens.delete(form.get('response') ?? '');
    if (known === undefined || form.get('secret') !== own || !form.has('remoteip')) return { success: false };
    provider.verified.push({ kind: known.kind, key: known.key });
    return { success: true, ...(known.score === undefined ? {} : { score: known.score }) };
  }

  const server = createServer(async (req, res) => {
    let text = '';
    for await (const chunk of req) text += chunk;
    const url = new URL(req.url ?? '/', provider.url);
    const answer = (/** @type {string} */ type, /** @type {string} */ body) => res.writeHead(200, { 'Content-Type': type, 'Cache-Control': 'no-store' }).end(body);
    const name = /^\/(\w+)\/api\.js$/.exec(url.pathname)?.[1];
    if (name !== undefined && provider.reachable) answer('text/javascript', script(name, provider.url));
    else if (url.pathname === '/frame') answer('text/html; charset=utf-8', draw(url));
    else if (url.pathname === '/siteverify') answer('application/json', JSON.stringify(verify(new URLSearchParams(text))));
    else res.writeHead(404).end();
  });
  return provider;
}
