import { describe, expect, it } from 'vitest';
import { subjectOf, takeBuyer } from './buyer';
import { readSettings } from './settings';

const token = (claims: object) => `h.${Buffer.from(JSON.stringify(claims)).toString('base64url')}.s`;

function storageOf(first: string | null = null): Storage {
  let held = first;
  return { getItem: () => held, setItem: (_key: string, value: string) => void (held = value) } as unknown as Storage;
}

function visit(hash: string, storage: Storage | null) {
  const shown: string[] = [];
  const history = { replaceState: (_data: unknown, _title: string, url: string) => shown.push(url) } as unknown as History;
  const buyer = takeBuyer({ hash, pathname: '/sale/', search: '?sku=W' } as Location, history, storage);
  return { buyer, shown };
}

describe('a token', () => {
  it('says who it is for', () => {
    expect(subjectOf(token({ sub: 'zoë@example.com' }))).toBe('zoë@example.com');
  });
  it.each(['', 'a', 'a.b.c', token({}), token({ sub: '' }), token({ sub: 7 })])('that is none (%j) says nothing', (text) => {
    expect(subjectOf(text)).toBeNull();
  });
  it('is taken out of the address and kept for the tab', () => {
    const storage = storageOf();
    const { buyer, shown } = visit(`#token=${token({ sub: 'ada' })}`, storage);
    expect(buyer?.userId).toBe('ada');
    expect(shown).toEqual(['/sale/?sku=W']);
    expect(visit('', storage)).toEqual({ buyer, shown: [] });
  });
  it('of a new address replaces the one before', () => {
    expect(visit(`#token=${token({ sub: 'bob' })}`, storageOf(token({ sub: 'ada' }))).buyer?.userId).toBe('bob');
  });
  it('is nobody when there is none, also without storage', () => {
    expect([visit('', storageOf()).buyer, visit('', null).buyer]).toEqual([null, null]);
  });
});

describe('the settings', () => {
  const tag = (content: string | null) => ({
    querySelector: () => (content === null ? null : { getAttribute: () => content }),
  }) as unknown as Document;
  it('are those of the tag', () => {
    const said = { identity: 'token', challenge: null };
    expect(readSettings(tag(JSON.stringify(said)))).toEqual(said);
  });
  it('want a name and no proof without a tag', () => {
    expect(readSettings(tag(null))).toEqual({ identity: 'header', challenge: null });
  });
});
