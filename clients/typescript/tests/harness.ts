// A real server of the tests' own, and a stand-in before it that loses, delays and refuses on demand.
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import http from 'node:http';
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const ROOT = resolve(import.meta.dirname, '../../..');
export const BINARY = resolve(process.env['WEIR_BINARY'] ?? join(ROOT, 'target/debug/weir'));
export const ADMIN_KEY = 'the-admin-key-of-these-tests';

export interface Server {
  url: string;
  token: string;
  stop(): Promise<void>;
}

export async function startServer(): Promise<Server> {
  const data = mkdtempSync(join(tmpdir(), 'weir-client-'));
  const env = {
    ...process.env,
    WEIR_ADMIN_KEY: ADMIN_KEY,
    WEIR_DATA: data,
    WEIR_LISTEN: '127.0.0.1:0',
    WEIR_GRPC_LISTEN: '127.0.0.1:0',
    WEIR_REQUEST_WEBHOOK_ALLOW_PRIVATE: 'true',
    WEIR_SALE_USER_PER_SECOND: '0',
  };
  const child: ChildProcess = spawn(BINARY, ['serve'], { cwd: data, env, stdio: ['ignore', 'pipe', 'inherit'] });
  const url = await new Promise<string>((found, failed) => {
    let output = '';
    child.stdout?.on('data', (bytes) => {
      output = (output + String(bytes)).slice(-65_536);
      const ready = /http:\/\/127\.0\.0\.1:\d+/.exec(output);
      if (ready) found(ready[0]);
    });
    child.once('error', failed);
    child.once('exit', (code) => failed(new Error(`the server ended with ${code}: ${output}`)));
  });
  const scopes = 'requests:create,requests:read,limits:check';
  const token = execFileSync(BINARY, ['token', '--sub', 'a@b.c', '--tenant', 'acme', '--scope', scopes], { cwd: data, env, encoding: 'utf8' }).trim();
  const stop = () =>
    new Promise<void>((done) => {
      child.once('exit', () => (rmSync(data, { recursive: true, force: true }), done()));
      child.kill('SIGKILL');
    });
  return { url, token, stop };
}

/** `lose` passes the call on and breaks the connection instead of answering; `hang` never answers; `cut` answers in part. */
export type Behaviour = 'lose' | 'hang' | 'cut' | { status: number; headers?: Record<string, string>; body?: unknown };
export interface Seen {
  method: string;
  path: string;
  headers: http.IncomingHttpHeaders;
  body: string;
  at: number;
}

/** Behaves as told, one call after the other, and then passes everything on. */
export class StandIn {
  readonly seen: Seen[] = [];
  readonly #behaviours: Behaviour[];
  readonly #server: http.Server;
  readonly #upstream: string;
  url = '';

  private constructor(upstream: string, behaviours: Behaviour[]) {
    this.#upstream = upstream;
    this.#behaviours = behaviours;
    this.#server = http.createServer((request, response) => void this.#handle(request, response));
  }

  static async start(upstream: string, ...behaviours: Behaviour[]): Promise<StandIn> {
    const made = new StandIn(upstream, behaviours);
    await new Promise<void>((done) => made.#server.listen(0, '127.0.0.1', done));
    made.url = `http://127.0.0.1:${(made.#server.address() as AddressInfo).port}`;
    return made;
  }

  /** Breaks all connections. */
  cut(): void {
    this.#server.closeAllConnections();
  }

  stop(): void {
    this.#server.close();
    this.cut();
  }

  async #handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const parts: Buffer[] = [];
    for await (const part of request) parts.push(part as Buffer);
    const body = Buffer.concat(parts).toString();
    this.seen.push({ method: request.method ?? '', path: request.url ?? '', headers: request.headers, body, at: performance.now() });
    const behaviour = this.#behaviours.shift();
    if (behaviour === 'hang') return;
    if (typeof behaviour === 'object') {
      response.writeHead(behaviour.status, behaviour.headers).end(JSON.stringify(behaviour.body ?? {}));
      return;
    }
    if (behaviour === 'cut') {
      response.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': '100' });
      response.write('{"status":', () => response.destroy());
      return;
    }
    const { method, headers } = request;
    const upstream = http.request(this.#upstream + (request.url ?? ''), { method: method ?? 'GET', headers }, (answer) => {
      if (behaviour === 'lose') {
        answer.resume().once('end', () => response.destroy());
        return;
      }
      response.writeHead(answer.statusCode ?? 500, answer.headers);
      response.flushHeaders();
      answer.pipe(response);
    });
    response.once('close', () => upstream.destroy());
    upstream.once('error', () => response.destroy());
    upstream.end(body);
  }
}
