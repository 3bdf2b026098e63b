// Build and tests. The output runs under a strict Content-Security-Policy and from any path: no inline script or
// style, no data: URLs, relative asset names with a hash of their content.
import { resolve } from 'node:path';
import { defineConfig } from 'vitest/config';

const here = import.meta.dirname;

export default defineConfig({
  base: './',
  build: {
    target: 'es2022',
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    rolldownOptions: {
      output: { chunkFileNames: 'assets/shared-[hash].js' },
      input: { index: resolve(here, 'index.html'), admin: resolve(here, 'admin.html'), console: resolve(here, 'console.html') },
    },
  },
  server: { proxy: Object.fromEntries(['/api', '/admin', '/v1', '/health'].map((path) => [path, 'http://127.0.0.1:8080'])) },
  test: {
    projects: [
      { extends: true, test: { name: 'unit', include: ['src/**/*.test.ts', 'mock/**/*.test.ts'] } },
      {
        extends: true,
        test: {
          name: 'browser',
          include: ['tests/**/*.test.ts'],
          // What must happen is waited for, for long: a busy machine fails nothing.
          expect: { poll: { timeout: 60_000 } },
          testTimeout: 180_000,
          hookTimeout: 60_000,
          fileParallelism: false,
        },
      },
    ],
  },
});
