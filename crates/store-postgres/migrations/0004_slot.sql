-- Slot: named paces and their versions.
CREATE TABLE rate_limit_config (
    config_name    text COLLATE "C" NOT NULL,
    version        integer     NOT NULL,
    max_per_window integer     NOT NULL CHECK (max_per_window >= 1),
    window_size    text        NOT NULL, -- ISO 8601, such as PT4S
    window_size_ms bigint      NOT NULL CHECK (window_size_ms >= 1),
    is_active      boolean     NOT NULL,
    created_at     timestamptz NOT NULL,
    PRIMARY KEY (config_name, version)
);
CREATE UNIQUE INDEX rate_limit_config_active ON rate_limit_config (config_name) WHERE is_active;

-- How many slots are scheduled inside a window, whatever version put them there. Behind each CLOSED one stands the next.
CREATE TABLE rate_limit_window_counter (
    config_name  text COLLATE "C" NOT NULL,
    window_start timestamptz NOT NULL,
    slot_count   integer     NOT NULL CHECK (slot_count >= 0),
    status       text COLLATE "C" NOT NULL CHECK (status IN ('OPEN', 'CLOSED')),
    PRIMARY KEY (config_name, window_start)
) WITH (fillfactor = 70);
CREATE INDEX rate_limit_window_counter_status ON rate_limit_window_counter (config_name, status, window_start);

CREATE TABLE rate_limit_event_slot (
    event_id       text COLLATE "C" PRIMARY KEY,
    config_name    text COLLATE "C" NOT NULL,
    requested_time timestamptz NOT NULL,
    window_start   timestamptz NOT NULL, -- of the pace it was put there by
    scheduled_time timestamptz NOT NULL
);
CREATE INDEX rate_limit_event_slot_time ON rate_limit_event_slot (config_name, scheduled_time);
