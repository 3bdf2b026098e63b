-- A cancelled request has the status FAILED_PERMANENT and is_cancelled: a server of the version before knows no other final status
-- and refuses its workers' reports all the same.
ALTER TABLE request_record ADD COLUMN is_cancelled boolean;

-- Whether new submissions are accepted; NULL means that nobody has switched it. Older servers do not know the switch.
ALTER TABLE request_rollout ADD COLUMN accepting_enabled boolean;

-- Requests of tenants whose data was erased. They are counted as purged, too, so that the books of older servers balance.
ALTER TABLE request_ledger ADD COLUMN erased bigint NOT NULL DEFAULT 0;

-- Tenants whose data is erased: everything that was submitted until begun_at. A row goes when nothing is left.
CREATE TABLE request_erasure (
    tenant_id text COLLATE "C" PRIMARY KEY,
    begun_at  timestamptz NOT NULL,
    erased    bigint      NOT NULL DEFAULT 0
);

-- New requests per minute that operators allow tenants, in place of the setting; 0 is no limit.
CREATE TABLE request_tenant_limit (
    tenant_id  text COLLATE "C" PRIMARY KEY,
    per_minute integer NOT NULL CHECK (per_minute >= 0)
);
