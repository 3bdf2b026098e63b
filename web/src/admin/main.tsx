// The product admin: create, edit and reset the sale of a product.
import { createRoot } from 'react-dom/client';
import { createApi } from '../api';
import { createServerClock } from '../clock';
import '../styles/base.css';
import '../styles/admin.css';
import { App } from './App';
import { createKeyring } from './keyring';

const clock = createServerClock();
const root = document.getElementById('root');
if (root) createRoot(root).render(<App api={createApi(clock)} clock={clock} keyring={createKeyring()} />);
