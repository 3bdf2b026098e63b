-- Until when a subscription counts, and the day on which its months begin (YYYY-MM-DD).
ALTER TABLE tier_subscription ADD COLUMN expires_at INTEGER;
ALTER TABLE tier_subscription ADD COLUMN anchor TEXT;
CREATE INDEX tier_subscription_expiry ON tier_subscription (expires_at) WHERE expires_at IS NOT NULL;

-- Whether operators have switched the limits of AI calls on or off while running.
CREATE TABLE tier_switch (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    is_enabled INTEGER NOT NULL
);
