-- Request: what callers read. Payloads and results are sealed. No index holds or asks for what changes while a request is
-- worked on, so that an update stays on its page.
CREATE TABLE request_record (
    request_id      uuid        PRIMARY KEY,
    tenant_id       text COLLATE "C" NOT NULL,
    request_type    text COLLATE "C" NOT NULL,
    status          text COLLATE "C" NOT NULL CHECK (status IN ('ACCEPTED', 'PENDING_ENQUEUE', 'IN_PROGRESS', 'COMPLETED',
                                                                'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED')),
    attempts        integer     NOT NULL DEFAULT 0,
    payload         bytea       NOT NULL,
    payload_key_id  text        NOT NULL,
    result          bytea,
    result_key_id   text,
    failure_code    text,
    failure_message text,
    callback_url    text,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX request_record_tenant ON request_record (tenant_id, request_id);

-- What a tenant's key stands for, until it expires.
CREATE TABLE idempotency_record (
    tenant_id       text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    payload_hash    bytea       NOT NULL,
    request_id      uuid        NOT NULL,
    expires_at      timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, idempotency_key)
);
CREATE INDEX idempotency_record_expires ON idempotency_record (expires_at);

-- What is still to be done. A job may be claimed from claimable_at on: when it is due or, if leased, when its lease ends.
-- Whoever changes a request locks its job first. Pending are those that a broker has yet to be given.
CREATE TABLE request_job (
    request_id   uuid        PRIMARY KEY,
    downstream   text COLLATE "C" NOT NULL,
    claimable_at timestamptz NOT NULL,
    is_leased    boolean     NOT NULL DEFAULT false,
    token        bigint      NOT NULL DEFAULT 0,
    attempts     integer     NOT NULL DEFAULT 0,
    is_pending   boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX request_job_claimable ON request_job (downstream, claimable_at);
CREATE INDEX request_job_pending ON request_job (request_id) WHERE is_pending;

-- Dead letters. The last token is kept, so that a worker from before a replay stays a late one.
CREATE TABLE request_dead (
    request_id uuid        PRIMARY KEY,
    downstream text COLLATE "C" NOT NULL,
    token      bigint      NOT NULL,
    died_at    timestamptz NOT NULL
);

-- How many new requests a tenant has sent in its window. Only written while there is a limit.
CREATE TABLE request_tenant (
    tenant_id         text COLLATE "C" PRIMARY KEY,
    current_count     integer     NOT NULL,
    last_refresh_time timestamptz NOT NULL
) WITH (fillfactor = 50);

-- What was switched on or off while running; no row, no such switch.
CREATE TABLE request_rollout (
    id                 smallint PRIMARY KEY CHECK (id = 1),
    processing_enabled boolean  NOT NULL,
    reconciler_enabled boolean  NOT NULL,
    canary_percent     smallint NOT NULL CHECK (canary_percent BETWEEN 0 AND 100)
);

-- The books: accepted = records by status + purged. Counts are spread over slots, so that servers rarely meet.
CREATE TABLE request_ledger (
    slot     smallint PRIMARY KEY,
    accepted bigint   NOT NULL DEFAULT 0,
    purged   bigint   NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
