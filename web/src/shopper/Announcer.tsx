// Says the moments that matter to a screen reader, in one polite live region.
import { useEffect, useRef, useState } from 'react';
import { announcement } from '../announce';
import type { Heard } from '../announce';
import type { ServerClock } from '../clock';
import type { SaleView } from '../sale';

export function Announcer({ view, clock }: { view: SaleView; clock: ServerClock }) {
  const [text, setText] = useState('');
  const last = useRef<Heard | null>(null);
  useEffect(() => {
    const listen = () => {
      const heard = { view, now: clock.now() };
      const said = announcement(last.current, heard);
      last.current = heard;
      if (said !== null) setText(said);
    };
    listen();
    const timer = setInterval(listen, 1000);
    return () => clearInterval(timer);
  }, [view, clock]);
  return (
    <p className="unseen" role="status" data-testid="announcer">
      {text}
    </p>
  );
}
