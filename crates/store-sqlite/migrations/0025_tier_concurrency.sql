-- Concurrency policies: how much may be in use at the same time. Apart from the other policies, which have another form.
CREATE TABLE tier_concurrency (
    scope      INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT    NOT NULL UNIQUE,
    max_in_use INTEGER NOT NULL,
    ttl_ms     INTEGER NOT NULL,
    shadow     INTEGER NOT NULL,
    on_outage  TEXT    NOT NULL CHECK (on_outage IN ('open', 'closed', 'local')),
    origin     TEXT    NOT NULL CHECK (origin IN ('file', 'operator'))
);

-- What is in use of them, until it is given back or its time is over.
CREATE TABLE tier_permit (
    permit_id   TEXT    PRIMARY KEY,
    scope       INTEGER NOT NULL,
    policy      TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    cost        INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    is_released INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX tier_permit_open ON tier_permit (scope, key, expires_at) WHERE is_released = 0;
CREATE INDEX tier_permit_expiry ON tier_permit (expires_at);
