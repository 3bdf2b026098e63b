// How fresh the numbers are, in one word and a sentence.
import type { Link } from '../feed';

const WORDS: Record<Link, [string, string]> = {
  connecting: ['Connecting', 'Connecting to live updates.'],
  live: ['Live', 'Stock and state arrive as they change.'],
  polling: ['Every 2 s', 'Live updates are interrupted; the page asks every two seconds.'],
  offline: ['Offline', 'The shop cannot be reached; what you see may be old.'],
};

export function LinkStatus({ link }: { link: Link }) {
  const [word, sentence] = WORDS[link];
  return (
    <p className="link" data-link={link} title={sentence}>
      <span className="link-dot" aria-hidden="true" />
      <span>{word}</span>
      <span className="unseen" role="status">
        {link === 'offline' ? sentence : ''}
      </span>
    </p>
  );
}
