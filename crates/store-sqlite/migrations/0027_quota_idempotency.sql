-- Idempotency keys of sends, as keyed hashes, in the order in which they expire. Without remaining and reset_at: the id that
-- the message is published under, recorded before that is done.
CREATE TABLE quota_idempotency (
    id           INTEGER PRIMARY KEY,
    key_hash     BLOB    NOT NULL UNIQUE,
    message_hash BLOB    NOT NULL,
    message_id   BLOB    NOT NULL,
    remaining    INTEGER,
    reset_at     INTEGER,
    expires_at   INTEGER NOT NULL
);

-- A count that was kept when the limit was lowered below it stays until its window ends.
CREATE TABLE rate_limit_store_new (
    user_id           TEXT    NOT NULL PRIMARY KEY,
    rate_limit        INTEGER NOT NULL CHECK (rate_limit >= 1),
    time_window       INTEGER NOT NULL CHECK (time_window >= 1), -- minutes
    current_count     INTEGER NOT NULL DEFAULT 0,
    last_refresh_time INTEGER NOT NULL,
    kept_count        INTEGER NOT NULL DEFAULT 0,
    CHECK (current_count BETWEEN 0 AND max(rate_limit, kept_count))
) WITHOUT ROWID;
INSERT INTO rate_limit_store_new (user_id, rate_limit, time_window, current_count, last_refresh_time)
SELECT user_id, rate_limit, time_window, current_count, last_refresh_time FROM rate_limit_store;
DROP TABLE rate_limit_store;
ALTER TABLE rate_limit_store_new RENAME TO rate_limit_store;
