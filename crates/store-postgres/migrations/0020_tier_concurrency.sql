-- Concurrency policies: how much may be in use at the same time. Apart from the other policies: a server of the version before
-- does not know their kind, and would read none of its policies any more.
CREATE TABLE tier_concurrency (
    scope      integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name       text    COLLATE "C" NOT NULL UNIQUE,
    max_in_use integer NOT NULL,
    ttl_ms     bigint  NOT NULL,
    shadow     boolean NOT NULL,
    on_outage  text    NOT NULL CHECK (on_outage IN ('open', 'closed', 'local')),
    origin     text    NOT NULL CHECK (origin IN ('file', 'operator'))
);

-- What is in use of them, until it is given back or its time is over.
CREATE TABLE tier_permit (
    permit_id   uuid        PRIMARY KEY,
    scope       integer     NOT NULL,
    policy      text        NOT NULL,
    key         text        COLLATE "C" NOT NULL,
    cost        integer     NOT NULL,
    expires_at  timestamptz NOT NULL,
    is_released boolean     NOT NULL
);
CREATE INDEX tier_permit_open ON tier_permit (scope, key, expires_at) WHERE NOT is_released;
CREATE INDEX tier_permit_expiry ON tier_permit (expires_at);
