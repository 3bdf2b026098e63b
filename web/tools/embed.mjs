// Tells cargo that there is a new page to put into the binary: it looks at the build script's time.
import { existsSync, utimesSync } from 'node:fs';
import { join } from 'node:path';

const script = join(import.meta.dirname, '../../crates/server/build.rs');
if (existsSync(script)) utimesSync(script, new Date(), new Date());
