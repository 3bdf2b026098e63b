// Who buys where tokens name buyers: the shop sends its visitors here with their token behind `#token=`, a part of the
// address that browsers send to no server. It is taken out of the address and kept for this tab.

export interface Buyer {
  token: string;
  /** What the token says, for the eye alone: the server checks it. */
  userId: string;
}

const KEY = 'weir.token';

/** The subject of a token, or `null` if it is none. */
export function subjectOf(token: string): string | null {
  try {
    const payload = (token.split('.')[1] ?? '').replace(/-/g, '+').replace(/_/g, '/');
    const bytes = Uint8Array.from(atob(payload), (letter) => letter.charCodeAt(0));
    const claims = JSON.parse(new TextDecoder().decode(bytes)) as { sub?: unknown };
    return typeof claims.sub === 'string' && claims.sub !== '' ? claims.sub : null;
  } catch {
    return null;
  }
}

/** Takes the token from the address, or else the one that this tab already has. */
export function takeBuyer(place: Location, history: History, storage: Storage | null): Buyer | null {
  const given = new URLSearchParams(place.hash.slice(1)).get('token');
  if (given !== null) {
    history.replaceState(null, '', place.pathname + place.search);
    remember(storage, given);
  }
  const token = given ?? recall(storage);
  const userId = token === null ? null : subjectOf(token);
  return token === null || userId === null ? null : { token, userId };
}

function remember(storage: Storage | null, token: string): void {
  try {
    storage?.setItem(KEY, token);
  } catch {
    // Full or forbidden: a reload needs the token again.
  }
}

function recall(storage: Storage | null): string | null {
  try {
    return storage?.getItem(KEY) ?? null;
  } catch {
    return null;
  }
}

export function tabStorage(): Storage | null {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}
