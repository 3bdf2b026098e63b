// Charts: uPlot in the colours of the page, and lines small enough for a cell of a table.
import { useEffect, useMemo, useRef, useState } from 'react';
import uPlot from 'uplot';
import 'uplot/dist/uPlot.min.css';
import { short, time } from './format';

export interface Line {
  label: string;
  values: (number | null)[];
  /** A custom property of the page's style. */
  color: string;
  fill?: boolean;
}

interface ChartProps {
  /** Seconds since 1970. */
  x: number[];
  lines: Line[];
  height?: number;
  format?: (value: number) => string;
  /** What the chart shows, for those who do not see it. */
  label: string;
  stepped?: boolean;
}

const dark = () => window.matchMedia('(prefers-color-scheme: dark)');

/** Draws again when the colours of the page change. */
function useTheme(): boolean {
  const [isDark, setDark] = useState(() => dark().matches);
  useEffect(() => {
    const query = dark();
    const listen = () => setDark(query.matches);
    query.addEventListener('change', listen);
    return () => query.removeEventListener('change', listen);
  }, []);
  return isDark;
}

function describe({ label, lines, format = short }: Pick<ChartProps, 'label' | 'lines' | 'format'>): string {
  const parts = lines.map((line) => {
    const known = line.values.filter((value): value is number => value !== null);
    return `${line.label}: now ${format(known.at(-1) ?? 0)}, at most ${format(Math.max(0, ...known))}`;
  });
  return `${label}. ${parts.join('; ')}.`;
}

export function Chart(props: ChartProps) {
  const { x, lines, height = 180, format = short, stepped = false } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [index, setIndex] = useState<number | null>(null);
  const isDark = useTheme();
  const shape = lines.map((line) => `${line.label}${line.color}`).join('|');

  useEffect(() => {
    const target = box.current;
    if (target === null) return;
    const style = getComputedStyle(target);
    const color = (name: string) => style.getPropertyValue(name).trim();
    const font = `11px ${style.fontFamily}`;
    const axis: uPlot.Axis = { stroke: color('--ink-soft'), font, grid: { stroke: color('--line'), width: 1 }, ticks: { show: false } };
    const path = stepped ? uPlot.paths.stepped?.({ align: 1 }) : undefined;
    const made = new uPlot(
      {
        width: target.clientWidth,
        height,
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 5 }, drag: { setScale: false } },
        scales: { x: { time: true }, y: { range: (_plot, _low, high) => [0, Math.max(1, high * 1.1)] } },
        axes: [
          { ...axis, grid: { show: false }, space: 60 },
          { ...axis, size: 46, space: 30, values: (_plot, values) => values.map((value) => format(value)) },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.label,
            stroke: color(line.color),
            width: 1.5,
            points: { show: false },
            ...(line.fill ? { fill: `${color(line.color)}1f` } : {}),
            ...(path ? { paths: path } : {}),
          })),
        ],
        hooks: { setCursor: [(self) => setIndex(self.cursor.idx ?? null)] },
      },
      [x, ...lines.map((line) => line.values)],
      target,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => {
      if (target.clientWidth > 0) made.setSize({ width: target.clientWidth, height });
    });
    observer.observe(target);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
    // The data follows below; everything else needs another plot.
  }, [shape, height, isDark, stepped]);

  useEffect(() => {
    plot.current?.setData([x, ...lines.map((line) => line.values)]);
  }, [x, lines]);

  const at = index ?? x.length - 1;
  return (
    <div className="chart">
      <div className="chart-legend" aria-hidden="true">
        {lines.map((line) => (
          <span key={line.label}>
            <i style={{ background: `var(${line.color})` }} />
            {line.label} <b>{format(line.values[at] ?? 0)}</b>
          </span>
        ))}
        <span className="chart-time">{x[at] === undefined ? '' : time((x[at] ?? 0) * 1000)}</span>
      </div>
      <div ref={box} className="chart-plot" role="img" aria-label={describe(props)} />
    </div>
  );
}

/** A line without axes. */
export function Spark({ values, label, tone = '--accent' }: { values: number[]; label: string; tone?: string }) {
  const width = 120;
  const height = 22;
  const points = useMemo(() => {
    const highest = Math.max(1, ...values);
    const step = width / Math.max(1, values.length - 1);
    return values.map((value, at) => `${(at * step).toFixed(1)},${(height - 1 - (value / highest) * (height - 2)).toFixed(1)}`).join(' ');
  }, [values]);
  return (
    <svg className="spark" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label} preserveAspectRatio="none">
      <polyline points={points} style={{ stroke: `var(${tone})` }} />
    </svg>
  );
}

/** Sums of equal parts of a column, so that it fits into a small line. */
export function thin(values: number[], parts: number): number[] {
  if (values.length <= parts) return values;
  const size = Math.ceil(values.length / parts);
  const sums: number[] = [];
  for (let from = values.length % size; from < values.length; from += size) {
    sums.push(values.slice(from, from + size).reduce((sum, value) => sum + value, 0));
  }
  return sums;
}
