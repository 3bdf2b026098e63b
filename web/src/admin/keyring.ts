// The admin key: in memory, and in this tab's sessionStorage only where the operator asks for it. Never in localStorage,
// a cookie or a URL.

export interface Keyring {
  load(): string | null;
  save(key: string): void;
  forget(): void;
}

const NAME = 'weir.admin-key';

function tab(): Storage | null {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}

export function createKeyring(): Keyring {
  return {
    load: () => tab()?.getItem(NAME) ?? null,
    save: (key) => tab()?.setItem(NAME, key),
    forget: () => tab()?.removeItem(NAME),
  };
}
