-- Idempotency keys are stored as keyed hashes once `request_index` has a row (see src/request/sealing.rs). The key of the hashes,
-- sealed once for each request key that opens it, and, if keys were stored as they are before, until when those may be in use.
CREATE TABLE request_index (
    id          smallint PRIMARY KEY CHECK (id = 1),
    plain_until timestamptz
);
CREATE TABLE request_index_key (
    name   text COLLATE "C" NOT NULL,
    digest text COLLATE "C" NOT NULL,
    sealed bytea            NOT NULL,
    PRIMARY KEY (name, digest)
);
