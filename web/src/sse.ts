// The text/event-stream format, parsed from chunks. EventSource is not used because it hides the heartbeat comments
// (so a dead connection looks alive), gives up on any HTTP error and forgets Last-Event-ID when it is made anew.

export interface StreamEvent {
  type: string;
  data: string;
}

export interface Parser {
  push(chunk: string): StreamEvent[];
  /** The id to resume from; `null` until the server sent one. */
  lastEventId(): string | null;
  /** What the server asked for with `retry:`, in milliseconds. */
  retryMs(): number | null;
}

export function createParser(resumeFrom: string | null = null): Parser {
  let rest = '';
  let type = '';
  let data: string[] = [];
  let id: string | null = resumeFrom;
  let pendingId: string | null = resumeFrom;
  let retry: number | null = null;
  let first = true;

  function field(line: string): void {
    const colon = line.indexOf(':');
    if (colon === 0) return;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (name === 'event') type = value;
    else if (name === 'data') data.push(value);
    else if (name === 'id' && !value.includes('\0')) pendingId = value === '' ? null : value;
    else if (name === 'retry' && /^\d+$/.test(value)) retry = Number(value);
  }

  function dispatch(): StreamEvent | null {
    // Only a whole event moves the id: one cut off in the middle has to be sent again.
    id = pendingId;
    const event = data.length > 0 ? { type: type || 'message', data: data.join('\n') } : null;
    type = '';
    data = [];
    return event;
  }

  return {
    lastEventId: () => id,
    retryMs: () => retry,
    push(chunk) {
      rest += first ? chunk.replace(/^\uFEFF/, '') : chunk;
      if (chunk !== '') first = false;
      const events: StreamEvent[] = [];
      // A trailing CR may be half of a CRLF, so it waits for the next chunk.
      for (let end; (end = /\r\n|\n|\r(?!$)/.exec(rest)); ) {
        const line = rest.slice(0, end.index);
        rest = rest.slice(end.index + end[0].length);
        if (line !== '') field(line);
        else {
          const event = dispatch();
          if (event) events.push(event);
        }
      }
      return events;
    },
  };
}
