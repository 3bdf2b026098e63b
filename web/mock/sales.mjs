// The sale's rules and books, as the contract has them, small enough to read at once. Everything is in one JSON file
// that is written before an answer leaves, so that a killed mock comes back with what it promised.
import { readFileSync, writeFileSync } from 'node:fs';

/** @typedef {'UPCOMING' | 'ACTIVE' | 'ENDED'} State */
/** @typedef {{ purchaseNo: string, purchasedAt: string }} Purchase */
/**
 * @typedef {object} Row
 * @property {string} sku
 * @property {string} productName
 * @property {number} initialStock
 * @property {number} startTime
 * @property {number} endTime
 * @property {string} createdAt
 * @property {State} state
 * @property {string | null} reason
 * @property {Record<string, Purchase>} buyers
 */
/** @typedef {{ id: number, event: string, data: Record<string, unknown> & { sku: string } }} SaleEvent */

const HISTORY = 200;

export class Refusal extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   * @param {object} [more]
   */
  constructor(status, code, message, more = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.more = more;
  }
}

/** @param {Record<string, string>} fields */
const invalid = (fields) => new Refusal(400, 'VALIDATION_ERROR', Object.values(fields)[0] ?? 'Invalid.', { fields });

export class Sales {
  /** @param {{ file?: string | undefined, now?: () => number, publish?: (event: SaleEvent) => void }} [options] */
  constructor({ file, now = Date.now, publish = () => {} } = {}) {
    this.file = file;
    this.now = now;
    this.publish = publish;
    /** @type {Record<string, Row>} */
    this.rows = {};
    /** @type {SaleEvent[]} */
    this.history = [];
    this.lastId = 0;
    /** The last event that is no longer kept. */
    this.droppedId = 0;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.load();
    this.turn();
  }

  load() {
    if (!this.file) return;
    try {
      const saved = JSON.parse(readFileSync(this.file, 'utf8'));
      this.rows = saved.rows;
      this.history = saved.history;
      this.lastId = saved.lastId;
      this.droppedId = saved.droppedId;
    } catch {
      // The first start: nothing is there yet.
    }
  }

  save() {
    if (this.file) writeFileSync(this.file, JSON.stringify({ rows: this.rows, history: this.history, lastId: this.lastId, droppedId: this.droppedId }));
  }

  close() {
    clearTimeout(this.timer);
  }

  /**
   * @param {string} event
   * @param {Record<string, unknown> & { sku: string }} data
   */
  emit(event, data) {
    this.lastId += 1;
    const entry = { id: this.lastId, event, data };
    this.history.push(entry);
    while (this.history.length > HISTORY) this.droppedId = this.history.shift()?.id ?? this.droppedId;
    this.publish(entry);
  }

  /**
   * The id to continue after, or `null` if not all that came after it is kept.
   * @param {string | string[] | undefined} lastEventId
   */
  resumable(lastEventId) {
    const id = Number(lastEventId ?? NaN);
    return id >= this.droppedId && id <= this.lastId ? id : null;
  }

  /** Applies the turns that are due and wakes up for the next one. */
  turn() {
    clearTimeout(this.timer);
    const now = this.now();
    let next = Infinity;
    for (const row of Object.values(this.rows)) {
      if (row.state === 'UPCOMING' && now >= row.startTime) this.become(row, 'ACTIVE', null);
      if (row.state === 'ACTIVE' && now >= row.endTime) this.become(row, 'ENDED', 'TIME_EXPIRED');
      if (row.state === 'UPCOMING') next = Math.min(next, row.startTime);
      if (row.state === 'ACTIVE') next = Math.min(next, row.endTime);
    }
    if (next !== Infinity) this.timer = setTimeout(() => this.turn(), Math.min(Math.max(next - now, 1), 60_000));
  }

  /**
   * @param {Row} row
   * @param {State} state
   * @param {string | null} reason
   */
  become(row, state, reason) {
    row.state = state;
    row.reason = reason;
    this.emit('state-change', { sku: row.sku, state, ...(reason ? { reason } : {}) });
    this.save();
  }

  /** @param {Row} row */
  stock(row) {
    return row.initialStock - Object.keys(row.buyers).length;
  }

  /** @param {string | null} sku */
  pick(sku) {
    this.turn();
    const rows = Object.values(this.rows);
    const row =
      sku !== null
        ? this.rows[sku]
        : (rows.filter((r) => r.state === 'ACTIVE').sort((a, b) => a.startTime - b.startTime)[0] ??
          rows.filter((r) => r.state === 'UPCOMING').sort((a, b) => a.startTime - b.startTime)[0] ??
          rows.sort((a, b) => b.endTime - a.endTime)[0]);
    if (!row) throw new Refusal(404, 'NOT_FOUND', 'No such sale.');
    return row;
  }

  /** @param {Row} row */
  status(row) {
    const { sku, state, initialStock, productName } = row;
    const stock = this.stock(row);
    const endReason = state !== 'ENDED' ? null : stock === 0 ? 'SOLD_OUT' : 'TIME_EXPIRED';
    return { sku, state, stock, initialStock, productName, startTime: iso(row.startTime), endTime: iso(row.endTime), endReason };
  }

  /**
   * @param {unknown} userId
   * @param {any} body
   * @returns {Purchase}
   */
  buy(userId, body) {
    const buyer = checkUser(userId);
    if (typeof body?.sku !== 'string') throw invalid({ sku: 'Must be a string' });
    if (body.qty !== 1) throw invalid({ qty: 'Must be exactly 1' });
    const row = this.pick(body.sku);
    if (row.buyers[buyer]) throw new Refusal(200, 'ALREADY_PURCHASED', 'You have already purchased this item.');
    if (row.reason === 'SOLD_OUT') throw new Refusal(200, 'SOLD_OUT', 'Sorry, all items have been sold.');
    if (row.state !== 'ACTIVE') throw new Refusal(200, 'SALE_NOT_ACTIVE', 'The sale is not active.');
    const purchasedAt = iso(this.now());
    const number = String(Object.keys(row.buyers).length + 1).padStart(4, '0');
    const purchase = { purchaseNo: `PUR-${purchasedAt.slice(0, 10).replaceAll('-', '')}-${number}`, purchasedAt };
    row.buyers[buyer] = purchase;
    this.emit('stock-update', { sku: row.sku, stock: this.stock(row) });
    if (this.stock(row) === 0) this.become(row, 'ENDED', 'SOLD_OUT');
    this.save();
    return purchase;
  }

  /**
   * @param {unknown} userId
   * @param {string | null} sku
   */
  find(userId, sku) {
    const buyer = checkUser(userId);
    const rows = sku === null ? Object.values(this.rows) : [this.pick(sku)];
    const purchase = rows.map((row) => row.buyers[buyer]).find(Boolean);
    if (!purchase) throw new Refusal(404, 'NOT_FOUND', 'No purchase found for this user.');
    return purchase;
  }

  /** @param {Row} row */
  product(row) {
    const { sku, productName, initialStock, state, createdAt } = row;
    return { sku, productName, initialStock, startTime: iso(row.startTime), endTime: iso(row.endTime), state, createdAt };
  }

  /** @param {Row} row */
  fullProduct(row) {
    return { ...this.product(row), currentStock: this.stock(row), totalPurchases: Object.keys(row.buyers).length };
  }

  /** @param {any} body */
  create(body) {
    if (typeof body?.sku !== 'string' || !/^[A-Za-z0-9-]{1,64}$/.test(body.sku)) {
      throw invalid({ sku: 'Must be 1 to 64 letters, digits and hyphens' });
    }
    if (this.rows[body.sku]) throw invalid({ sku: 'Exists already' });
    const fields = this.checkProduct({ productName: undefined, initialStock: undefined, startTime: undefined, endTime: undefined, ...body });
    /** @type {Row} */
    const row = { sku: body.sku, ...fields, createdAt: iso(this.now()), state: 'UPCOMING', reason: null, buyers: {} };
    this.rows[row.sku] = row;
    this.save();
    this.turn();
    return this.product(row);
  }

  /**
   * @param {string} sku
   * @param {any} body
   */
  update(sku, body) {
    const row = this.pick(sku);
    if (row.state !== 'UPCOMING') {
      throw new Refusal(200, 'SALE_NOT_MODIFIABLE', 'Cannot modify product while sale is active or ended.');
    }
    const whole = { productName: row.productName, initialStock: row.initialStock, startTime: iso(row.startTime), endTime: iso(row.endTime) };
    Object.assign(row, this.checkProduct({ ...whole, ...body }));
    this.save();
    this.turn();
    return this.product(row);
  }

  /** @param {any} body */
  checkProduct(body) {
    /** @type {Record<string, string>} */
    const fields = {};
    const startTime = Date.parse(body.startTime);
    const endTime = Date.parse(body.endTime);
    const productName = typeof body.productName === 'string' ? body.productName.trim() : '';
    if (productName === '' || productName.length > 255) fields['productName'] = 'Must be 1 to 255 characters';
    if (!Number.isInteger(body.initialStock) || body.initialStock < 1) fields['initialStock'] = 'Must be a positive integer';
    if (!(startTime > this.now())) fields['startTime'] = 'Must be a time in the future';
    if (!(endTime > startTime)) fields['endTime'] = 'Must be after startTime';
    if (Object.keys(fields).length > 0) throw invalid(fields);
    return { productName, initialStock: body.initialStock, startTime, endTime };
  }

  /** @param {string} sku */
  reset(sku) {
    this.pick(sku);
    delete this.rows[sku];
    this.history = this.history.filter((event) => event.data.sku !== sku);
    this.save();
    return { message: `Product ${sku} and all associated sale data have been reset.` };
  }
}

/** @param {number} ms */
function iso(ms) {
  return new Date(ms).toISOString();
}

/** @param {unknown} userId */
function checkUser(userId) {
  const id = typeof userId === 'string' ? userId.trim() : '';
  if (id === '' || id.length > 255) throw invalid({ 'X-User-Id': 'Must be a non-empty string (max 255 characters)' });
  return id;
}
