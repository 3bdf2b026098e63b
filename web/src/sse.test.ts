import { describe, expect, it } from 'vitest';
import { decodeEvent } from './contract';
import { createParser } from './sse';

const STREAM =
  ': hello\nretry: 2500\n\nevent: initial\nid: 1\ndata: {"a":1}\n\nevent: stock-update\r\nid: 2\r\ndata: x\r\ndata: y\r\n\r\ndata: plain\r\r';

describe('event stream', () => {
  it('is read whole', () => {
    const parser = createParser();
    expect(parser.push(STREAM + '\n')).toEqual([
      { type: 'initial', data: '{"a":1}' },
      { type: 'stock-update', data: 'x\ny' },
      { type: 'message', data: 'plain' },
    ]);
    expect(parser.lastEventId()).toBe('2');
    expect(parser.retryMs()).toBe(2500);
  });

  it('is the same however it is cut', () => {
    const whole = createParser().push(STREAM + '\n');
    for (let cut = 1; cut < STREAM.length; cut += 1) {
      const parser = createParser();
      expect([...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut) + '\n')]).toEqual(whole);
    }
    const parser = createParser();
    expect([...(STREAM + '\n')].flatMap((character) => parser.push(character))).toEqual(whole);
  });

  it('does not move the id for an event that was cut off', () => {
    const parser = createParser('7');
    parser.push('event: stock-update\nid: 8\ndata: {"st');
    expect(parser.lastEventId()).toBe('7');
    parser.push('ock":1}\n\n');
    expect(parser.lastEventId()).toBe('8');
  });

  it('skips a byte order mark and comments', () => {
    expect(createParser().push('\uFEFF: beat\n\ndata: 1\n\n')).toEqual([{ type: 'message', data: '1' }]);
  });
});

describe('events', () => {
  it('are decoded, and unknown ones are passed over', () => {
    expect(decodeEvent('stock-update', '{"sku":"A","stock":3}')).toEqual({ type: 'stock-update', sku: 'A', stock: 3 });
    expect(decodeEvent('state-change', '{"sku":"A","state":"ENDED","reason":"SOLD_OUT"}')).toMatchObject({ reason: 'SOLD_OUT' });
    expect(decodeEvent('weather', 'not even JSON')).toBeNull();
  });

  it('that break the contract are refused', () => {
    expect(() => decodeEvent('stock-update', '{"sku":"A","stock":-1}')).toThrow();
    expect(() => decodeEvent('state-change', '{"sku":"A","state":"PAUSED"}')).toThrow();
  });
});
