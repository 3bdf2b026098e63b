-- Idempotency keys of sends, as keyed hashes, until they expire. Without remaining and reset_at: the id that the message is
-- published under, recorded before that is done.
CREATE TABLE quota_idempotency (
    key_hash     bytea       PRIMARY KEY,
    message_hash bytea       NOT NULL,
    message_id   uuid        NOT NULL,
    remaining    integer,
    reset_at     timestamptz,
    expires_at   timestamptz NOT NULL
);
CREATE INDEX quota_idempotency_expires ON quota_idempotency (expires_at);

-- A count that was kept when the limit was lowered below it stays until its window ends. Servers of the version before never
-- count past the limit, and deny while the count is above it.
ALTER TABLE rate_limit_store ADD COLUMN kept_count integer NOT NULL DEFAULT 0;
ALTER TABLE rate_limit_store DROP CONSTRAINT rate_limit_store_check;
ALTER TABLE rate_limit_store ADD CONSTRAINT rate_limit_store_count
    CHECK (current_count BETWEEN 0 AND greatest(rate_limit, kept_count)) NOT VALID;
