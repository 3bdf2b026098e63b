// node mock/main.mjs [--port 8080] [--state file.json] [--demo]
// Serves the built page and the mock of the sale API. `--demo` opens a sale in 15 s, with simulated buyers.
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { createMock, settingsOf } from './server.mjs';

const { values } = parseArgs({
  options: { port: { type: 'string', default: '8080' }, state: { type: 'string' }, demo: { type: 'boolean', default: false } },
});

const adminKey = process.env['WEIR_ADMIN_KEY'] ?? 'test-admin-key';
const mock = createMock({ file: values.state, adminKey, dist: join(import.meta.dirname, '../dist'), settings: settingsOf(process.env) });
await mock.listen(Number(values.port));
const address = mock.server.address();
const port = typeof address === 'object' ? address?.port : values.port;
process.stdout.write(`ready http://127.0.0.1:${port}/sale/\n`);

if (values.demo) {
  const start = Date.now() + 15_000;
  mock.sales.create({
    sku: 'DEMO-001',
    productName: 'Limited Edition Widget',
    initialStock: 100,
    startTime: new Date(start).toISOString(),
    endTime: new Date(start + 300_000).toISOString(),
  });
  let buyer = 0;
  setInterval(() => {
    try {
      mock.sales.buy(`demo-${(buyer += 1)}@example.com`, { sku: 'DEMO-001', qty: 1 });
    } catch {
      // Not open yet, or sold out: the demo goes on either way.
    }
  }, 900);
}
