-- Request: what callers read. Times are microseconds since 1970, UTC. Payloads and results are sealed.
CREATE TABLE request_record (
    id              INTEGER PRIMARY KEY,
    request_id      TEXT    NOT NULL UNIQUE,
    tenant_id       TEXT    NOT NULL,
    request_type    TEXT    NOT NULL,
    status          TEXT    NOT NULL CHECK (status IN ('ACCEPTED', 'PENDING_ENQUEUE', 'IN_PROGRESS', 'COMPLETED',
                                                       'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED')),
    attempts        INTEGER NOT NULL DEFAULT 0,
    payload         BLOB    NOT NULL,
    payload_key_id  TEXT    NOT NULL,
    result          BLOB,
    result_key_id   TEXT,
    failure_code    TEXT,
    failure_message TEXT,
    callback_url    TEXT,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL
);
CREATE INDEX request_record_tenant ON request_record (tenant_id, request_id);
CREATE INDEX request_record_pending ON request_record (updated_at) WHERE status = 'PENDING_ENQUEUE';

-- What a tenant's key stands for, until it expires.
CREATE TABLE idempotency_record (
    tenant_id       TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    payload_hash    BLOB    NOT NULL,
    request_id      TEXT    NOT NULL,
    expires_at      INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, idempotency_key)
) WITHOUT ROWID;
CREATE INDEX idempotency_record_expires ON idempotency_record (expires_at);

-- What is still to be done. A job may be claimed from claimable_at on: when it is due or, if leased, when its lease ends.
CREATE TABLE request_job (
    request_id   TEXT    NOT NULL PRIMARY KEY,
    downstream   TEXT    NOT NULL,
    claimable_at INTEGER NOT NULL,
    is_leased    INTEGER NOT NULL DEFAULT 0,
    token        INTEGER NOT NULL DEFAULT 0,
    attempts     INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX request_job_claimable ON request_job (downstream, claimable_at);

-- Dead letters. The last token is kept, so that a worker from before a replay stays a late one.
CREATE TABLE request_dead (
    request_id TEXT    NOT NULL PRIMARY KEY,
    downstream TEXT    NOT NULL,
    token      INTEGER NOT NULL,
    died_at    INTEGER NOT NULL
) WITHOUT ROWID;

-- How many new requests a tenant has sent in its window. Only written while there is a limit.
CREATE TABLE request_tenant (
    tenant_id         TEXT    NOT NULL PRIMARY KEY,
    current_count     INTEGER NOT NULL,
    last_refresh_time INTEGER NOT NULL
) WITHOUT ROWID;

-- What was switched on or off while running; no row, no such switch.
CREATE TABLE request_rollout (
    id                 INTEGER PRIMARY KEY CHECK (id = 1),
    processing_enabled INTEGER NOT NULL,
    reconciler_enabled INTEGER NOT NULL,
    canary_percent     INTEGER NOT NULL CHECK (canary_percent BETWEEN 0 AND 100)
);

-- The books: accepted = records by status + purged.
CREATE TABLE request_ledger (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    accepted INTEGER NOT NULL DEFAULT 0,
    purged   INTEGER NOT NULL DEFAULT 0
);
INSERT INTO request_ledger (id) VALUES (1);
