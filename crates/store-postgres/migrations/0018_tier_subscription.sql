-- Until when a subscription counts, and the day on which its months begin. Both belong to the subscription that was put at
-- `terms_at`: another `updated_at` says that a server of the version before, which knows neither, has put one since.
ALTER TABLE tier_subscription ADD COLUMN expires_at timestamptz, ADD COLUMN anchor text, ADD COLUMN terms_at timestamptz;

-- Whether operators have switched the limits of AI calls on or off while running.
CREATE TABLE tier_switch (
    id         smallint PRIMARY KEY CHECK (id = 1),
    is_enabled boolean  NOT NULL
);
