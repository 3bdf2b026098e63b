-- Tier: who has subscribed to what.
CREATE TABLE tier_subscription (
    user_id    text        COLLATE "C" PRIMARY KEY,
    plan       text        NOT NULL,
    updated_at timestamptz NOT NULL
);

-- What operators have set of tiers while running.
CREATE TABLE tier_setting (
    tier                text    PRIMARY KEY CHECK (tier IN ('free', 'starter', 'pro', 'business')),
    requests_per_minute integer NOT NULL,
    burst_capacity      integer NOT NULL,
    daily_limit         integer NOT NULL
);

-- Limits that callers name. The number of one is never given to another.
CREATE TABLE tier_policy (
    scope         integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name          text    COLLATE "C" NOT NULL UNIQUE,
    kind          text    NOT NULL CHECK (kind IN ('fixed_window', 'token_bucket', 'sliding_window')),
    amount        integer NOT NULL,
    refill        integer NOT NULL,
    period_ms     bigint  NOT NULL,
    shadow        boolean NOT NULL,
    on_outage     text    NOT NULL CHECK (on_outage IN ('open', 'closed', 'local')),
    match_domain  text,
    match_entries text,
    origin        text    NOT NULL CHECK (origin IN ('file', 'operator'))
);

CREATE TABLE tier_hold (
    hold_id    uuid        PRIMARY KEY,
    scope      integer     NOT NULL,
    policy     text        NOT NULL,
    key        text        NOT NULL,
    cost       bigint      NOT NULL,
    taken_at   timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    settled    bigint
);
CREATE INDEX tier_hold_expiry ON tier_hold (expires_at);

-- What keys have spent, as a server's memory of limits last told.
CREATE TABLE tier_spent (
    scope integer NOT NULL,
    key   text    COLLATE "C" NOT NULL,
    spent text    NOT NULL,
    PRIMARY KEY (scope, key)
);

-- What was changed, in the order it was committed: whoever changes something holds the version until its commit.
CREATE TABLE tier_version (
    id      smallint PRIMARY KEY CHECK (id = 1),
    version bigint   NOT NULL
);
INSERT INTO tier_version (id, version) VALUES (1, 0);
CREATE TABLE tier_change (
    version bigint PRIMARY KEY,
    user_id text
);
