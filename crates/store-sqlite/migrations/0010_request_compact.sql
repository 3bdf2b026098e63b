-- A request's job is part of its row: one row and one index less to write for each. It may be claimed from claimable_at
-- on, when it is due or, if leased, when its lease ends. Without claimable_at there is nothing to do.
ALTER TABLE request_record ADD COLUMN downstream TEXT;
ALTER TABLE request_record ADD COLUMN claimable_at INTEGER;
ALTER TABLE request_record ADD COLUMN is_leased INTEGER NOT NULL DEFAULT 0;
ALTER TABLE request_record ADD COLUMN token INTEGER NOT NULL DEFAULT 0;
UPDATE request_record
SET (downstream, claimable_at, is_leased, token) = (
    SELECT downstream, claimable_at, is_leased, token FROM request_job WHERE request_job.request_id = request_record.request_id)
WHERE request_id IN (SELECT request_id FROM request_job);
DROP TABLE request_job;
CREATE INDEX request_record_claimable ON request_record (downstream, claimable_at) WHERE claimable_at IS NOT NULL;

-- Keys are drawn at random, so whatever is ordered by them is written page by page: that is the index alone now. Rows are
-- in the order in which they expire, which needs no other index.
CREATE TABLE idempotency_record_new (
    id              INTEGER PRIMARY KEY,
    tenant_id       TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    payload_hash    BLOB    NOT NULL,
    request_id      TEXT    NOT NULL,
    expires_at      INTEGER NOT NULL,
    UNIQUE (tenant_id, idempotency_key)
);
INSERT INTO idempotency_record_new (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
SELECT tenant_id, idempotency_key, payload_hash, request_id, expires_at FROM idempotency_record ORDER BY expires_at;
DROP TABLE idempotency_record;
ALTER TABLE idempotency_record_new RENAME TO idempotency_record;
