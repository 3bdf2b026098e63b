-- Slot: named paces and their versions. Times are microseconds since 1970, UTC.
CREATE TABLE rate_limit_config (
    config_name    TEXT    NOT NULL,
    version        INTEGER NOT NULL,
    max_per_window INTEGER NOT NULL CHECK (max_per_window >= 1),
    window_size    TEXT    NOT NULL, -- ISO 8601, such as PT4S
    window_size_ms INTEGER NOT NULL CHECK (window_size_ms >= 1),
    is_active      INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    PRIMARY KEY (config_name, version)
) WITHOUT ROWID;

-- How many slots are scheduled inside a window, whatever version put them there. Behind each CLOSED one stands the next.
CREATE TABLE rate_limit_window_counter (
    config_name  TEXT    NOT NULL,
    window_start INTEGER NOT NULL,
    slot_count   INTEGER NOT NULL CHECK (slot_count >= 0),
    status       TEXT    NOT NULL CHECK (status IN ('OPEN', 'CLOSED')),
    PRIMARY KEY (config_name, window_start)
) WITHOUT ROWID;
CREATE INDEX rate_limit_window_counter_status ON rate_limit_window_counter (config_name, status, window_start);

CREATE TABLE rate_limit_event_slot (
    event_id       TEXT    NOT NULL PRIMARY KEY,
    config_name    TEXT    NOT NULL,
    requested_time INTEGER NOT NULL,
    window_start   INTEGER NOT NULL, -- of the pace it was put there by
    scheduled_time INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX rate_limit_event_slot_time ON rate_limit_event_slot (config_name, scheduled_time);
