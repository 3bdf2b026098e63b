// Makes a program of the lines of README.md: tests/readme.ts, compiled with the tests and run by one of them.
import { readFileSync, writeFileSync } from 'node:fs';

const read = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
const blocks = [...read.matchAll(/^```ts\n(.*?)^```$/gms)].map(([, code]) => code);
writeFileSync(new URL('readme.ts', import.meta.url), blocks.join('\n'));
