-- Tier: who has subscribed to what. Times are microseconds since 1970, UTC.
CREATE TABLE tier_subscription (
    user_id    TEXT    PRIMARY KEY,
    plan       TEXT    NOT NULL,
    updated_at INTEGER NOT NULL
) WITHOUT ROWID;

-- What operators have set of tiers while running.
CREATE TABLE tier_setting (
    tier                TEXT    PRIMARY KEY CHECK (tier IN ('free', 'starter', 'pro', 'business')),
    requests_per_minute INTEGER NOT NULL,
    burst_capacity      INTEGER NOT NULL,
    daily_limit         INTEGER NOT NULL
) WITHOUT ROWID;

-- Limits that callers name. The number of one is never given to another.
CREATE TABLE tier_policy (
    scope         INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT    NOT NULL UNIQUE,
    kind          TEXT    NOT NULL CHECK (kind IN ('fixed_window', 'token_bucket', 'sliding_window')),
    amount        INTEGER NOT NULL,
    refill        INTEGER NOT NULL,
    period_ms     INTEGER NOT NULL,
    shadow        INTEGER NOT NULL,
    on_outage     TEXT    NOT NULL CHECK (on_outage IN ('open', 'closed', 'local')),
    match_domain  TEXT,
    match_entries TEXT,
    origin        TEXT    NOT NULL CHECK (origin IN ('file', 'operator'))
);

CREATE TABLE tier_hold (
    hold_id    TEXT    PRIMARY KEY,
    scope      INTEGER NOT NULL,
    policy     TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    cost       INTEGER NOT NULL,
    taken_at   INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    settled    INTEGER
) WITHOUT ROWID;
CREATE INDEX tier_hold_expiry ON tier_hold (expires_at);

-- What keys have spent, as the memory of limits last told.
CREATE TABLE tier_spent (
    scope INTEGER NOT NULL,
    key   TEXT    NOT NULL,
    spent TEXT    NOT NULL,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;
