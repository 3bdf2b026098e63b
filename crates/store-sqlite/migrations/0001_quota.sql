-- Quota: one row a user. Times are microseconds since 1970, UTC.
CREATE TABLE rate_limit_store (
    user_id           TEXT    NOT NULL PRIMARY KEY,
    rate_limit        INTEGER NOT NULL CHECK (rate_limit >= 1),
    time_window       INTEGER NOT NULL CHECK (time_window >= 1), -- minutes
    current_count     INTEGER NOT NULL DEFAULT 0 CHECK (current_count BETWEEN 0 AND rate_limit),
    last_refresh_time INTEGER NOT NULL
) WITHOUT ROWID;
