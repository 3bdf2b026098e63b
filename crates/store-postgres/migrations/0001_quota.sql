-- Quota: one row a user. Room is left on each page, so that a count is updated in place without touching the index.
CREATE TABLE rate_limit_store (
    user_id           text COLLATE "C" PRIMARY KEY,
    rate_limit        integer     NOT NULL CHECK (rate_limit >= 1),
    time_window       integer     NOT NULL CHECK (time_window >= 1), -- minutes
    current_count     integer     NOT NULL DEFAULT 0 CHECK (current_count BETWEEN 0 AND rate_limit),
    last_refresh_time timestamptz NOT NULL
) WITH (fillfactor = 60);
