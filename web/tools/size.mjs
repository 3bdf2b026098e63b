// Says what a visitor downloads: each built file, plain and gzipped; and holds each page to its budget.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';

const BUDGET_KIB = 85;
/** Operators open the console once a day; its charts are worth it. */
const CONSOLE_BUDGET_KIB = 300;
const dist = join(import.meta.dirname, '../dist');

/** @param {string} name */
const sizes = (name) => {
  const content = readFileSync(join(dist, name));
  return { plain: content.length, zipped: gzipSync(content, { level: 9 }).length };
};

/** @param {number} bytes */
const kib = (bytes) => `${(bytes / 1024).toFixed(1)} KiB`;

/** @param {string} html */
function total(html) {
  const assets = [...readFileSync(join(dist, html), 'utf8').matchAll(/(?:src|href)="\.\/([^"]+)"/g)].map((match) => match[1] ?? '');
  return [html, ...assets].map(sizes).reduce((sum, one) => ({ plain: sum.plain + one.plain, zipped: sum.zipped + one.zipped }));
}

for (const html of readdirSync(dist).filter((name) => name.endsWith('.html'))) {
  const { plain, zipped } = total(html);
  process.stdout.write(`${html} with all it loads: ${kib(plain)}, gzipped ${kib(zipped)}\n`);
  const budget = html === 'console.html' ? CONSOLE_BUDGET_KIB : BUDGET_KIB;
  if (zipped > budget * 1024) {
    process.stderr.write(`${html} is over its budget of ${budget} KiB gzipped\n`);
    process.exitCode = 1;
  }
}
