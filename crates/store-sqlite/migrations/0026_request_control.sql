-- A cancelled request has the status FAILED_PERMANENT and is_cancelled: another status would need a copy of the table, whose CHECK
-- names all of them.
ALTER TABLE request_record ADD COLUMN is_cancelled INTEGER;

-- Whether new submissions are accepted; NULL means that nobody has switched it.
ALTER TABLE request_rollout ADD COLUMN accepting_enabled INTEGER;

-- Requests of tenants whose data was erased; counted as purged, too.
ALTER TABLE request_ledger ADD COLUMN erased INTEGER NOT NULL DEFAULT 0;

-- Tenants whose data is erased: everything that was submitted until begun_at. A row goes when nothing is left.
CREATE TABLE request_erasure (
    tenant_id TEXT    NOT NULL PRIMARY KEY,
    begun_at  INTEGER NOT NULL,
    erased    INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- New requests per minute that operators allow tenants, in place of the setting; 0 is no limit.
CREATE TABLE request_tenant_limit (
    tenant_id  TEXT    NOT NULL PRIMARY KEY,
    per_minute INTEGER NOT NULL CHECK (per_minute >= 0)
) WITHOUT ROWID;
