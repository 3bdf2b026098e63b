// Server-sent events: reads a stream, and resumes it where it broke off.
import { WeirError, jitter, sleep, timerMs } from './http.js';
import type { Transport } from './http.js';

export interface RawEvent {
  type: string;
  id: string;
  data: string;
}

/** A comment comes every 15 or 30 s, so a stream that is silent for longer is dead. */
const SILENCE_MS = 75_000;
const EVENT_MAX = 1 << 20;

export interface StreamOptions {
  /** The id of the last event that was seen: the stream goes on after it. */
  lastEventId?: string;
  signal?: AbortSignal;
  silenceMs?: number;
}

/** Never ends by itself: a stream that ends or breaks is opened again. Throws what a repetition cannot mend. */
export async function* events(transport: Transport, path: string, query: Record<string, string | undefined>, options: StreamOptions): AsyncGenerator<RawEvent, void> {
  let lastEventId = options.lastEventId ?? '';
  for (let attempt = 0; ; attempt += 1) {
    let retryAfterMs = 0;
    const call = { query, headers: { Accept: 'text/event-stream', ...(lastEventId && { 'Last-Event-ID': lastEventId }) } };
    const headers = await transport.headers(call);
    const stop = new AbortController();
    const signal = options.signal ? AbortSignal.any([options.signal, stop.signal]) : stop.signal;
    let timer = setTimeout(() => stop.abort(), timerMs(transport.attemptMs));
    try {
      const response = await transport.open('GET', path, headers, call, signal);
      const heard = () => (clearTimeout(timer), (timer = setTimeout(() => stop.abort(), timerMs(options.silenceMs ?? SILENCE_MS))));
      heard();
      for await (const event of parse(response, heard)) {
        attempt = 0;
        lastEventId = event.id || lastEventId;
        yield event;
      }
    } catch (error) {
      if (options.signal?.aborted) throw options.signal.reason;
      if (error instanceof WeirError) {
        if (error.status < 500 && error.status !== 429 && error.status !== 408) throw error;
        retryAfterMs = error.retryAfterMs ?? 0;
      }
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
    await sleep(retryAfterMs + jitter(attempt), options.signal);
  }
}

async function* parse(response: Response, heard: () => void): AsyncGenerator<RawEvent> {
  if (response.body === null) return;
  const decoder = new TextDecoder();
  let text = '';
  let event = { type: 'message', id: '', data: '' };
  for await (const bytes of response.body) {
    heard();
    text += decoder.decode(bytes, { stream: true });
    if (text.length + event.data.length > EVENT_MAX) throw new WeirError('UNEXPECTED_ANSWER', 'an event is longer than 1 MiB');
    const lines = text.split(/\r\n|\n/);
    text = lines.pop() ?? '';
    for (const line of lines) {
      const [, field, value = ''] = /^([^:]*)(?:: ?(.*))?$/s.exec(line) ?? [];
      if (line === '') {
        if (event.data !== '') yield { ...event, data: event.data.slice(0, -1) };
        event = { type: 'message', id: '', data: '' };
      } else if (field === 'data') event.data += `${value}\n`;
      else if (field === 'event') event.type = value;
      else if (field === 'id') event.id = value;
    }
  }
}
