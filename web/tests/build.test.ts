// What is built can be served from any path under a strict policy.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';

const dist = join(import.meta.dirname, '../dist');

describe.each(['index.html', 'admin.html', 'console.html'])('%s', (name) => {
  const html = readFileSync(join(dist, name), 'utf8');

  it('has no inline script, style or handler', () => {
    expect(html).not.toMatch(/<style|\sstyle=|\son\w+=|javascript:/i);
    for (const [, attributes, body] of html.matchAll(/<script([^>]*)>([^<]*)<\/script>/g)) {
      expect(attributes).toContain('src=');
      expect(body).toBe('');
    }
  });

  it('loads relative, hashed files that exist, and nothing else', () => {
    const loaded = [...html.matchAll(/<(?:script|link)[^>]*(?:src|href)="([^"]+)"/g)].map((match) => match[1] ?? '');
    expect(loaded.length).toBeGreaterThan(2);
    for (const path of loaded) {
      expect(path).toMatch(/^\.\/assets\/[\w-]+-[\w-]{8}\.(js|css|svg)$/);
      expect(readdirSync(join(dist, 'assets'))).toContain(path.slice('./assets/'.length));
    }
  });
});

it('names no other host', () => {
  for (const file of readdirSync(join(dist, 'assets'))) {
    const hosts = readFileSync(join(dist, 'assets', file), 'utf8').match(/https?:\/\/[\w.-]+/g) ?? [];
    expect(hosts.filter((host) => !/^https?:\/\/(www\.w3\.org|react\.dev)$/.test(host))).toEqual([]);
  }
});
