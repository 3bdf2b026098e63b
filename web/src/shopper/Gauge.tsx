// The stock as a water level behind a weir, with the marks of a staff gauge. Everything on the gauge is drawn twice, dry
// and under water, and the two are cut at the surface: so the figures keep their contrast at every level.
import type { CSSProperties } from 'react';

interface GaugeProps {
  stock: number;
  initialStock: number;
  ended: boolean;
}

export function Gauge({ stock, initialStock, ended }: GaugeProps) {
  const level = initialStock > 0 ? Math.min(1, stock / initialStock) : 0;
  const said = `${stock} of ${initialStock} left`;
  return (
    <div
      className="gauge"
      role="meter"
      aria-label="Stock"
      aria-valuemin={0}
      aria-valuemax={initialStock}
      aria-valuenow={stock}
      aria-valuetext={said}
      data-ended={ended}
      style={{ '--level': level } as CSSProperties}
    >
      <Face stock={stock} initialStock={initialStock} />
      <div className="water" aria-hidden="true">
        <svg className="wave" viewBox="0 0 800 12" preserveAspectRatio="none" focusable="false">
          <path d="M0 6 Q50 0 100 6 T200 6 T300 6 T400 6 T500 6 T600 6 T700 6 T800 6 V12 H0 Z" />
        </svg>
      </div>
      <div className="wet" aria-hidden="true">
        <Face stock={stock} initialStock={initialStock} />
      </div>
    </div>
  );
}

function Face({ stock, initialStock }: Omit<GaugeProps, 'ended'>) {
  return (
    <div className="face" aria-hidden="true">
      <p className="figure">
        <b data-digits={String(stock).length}>{stock.toLocaleString('en-GB')}</b>
        <span>left of {initialStock.toLocaleString('en-GB')}</span>
      </p>
      <div className="marks">
        {Array.from({ length: 11 }, (_, mark) => (
          <span key={mark} />
        ))}
      </div>
    </div>
  );
}
