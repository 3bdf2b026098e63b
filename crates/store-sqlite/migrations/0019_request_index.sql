-- Idempotency keys are stored as keyed hashes. The key of the hashes, sealed once for each request key that opens it, and, if keys
-- were stored as they are before, until when those may be in use.
CREATE TABLE request_index (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    plain_until INTEGER
);
CREATE TABLE request_index_key (
    name   TEXT NOT NULL,
    digest TEXT NOT NULL,
    sealed BLOB NOT NULL,
    PRIMARY KEY (name, digest)
) WITHOUT ROWID;
