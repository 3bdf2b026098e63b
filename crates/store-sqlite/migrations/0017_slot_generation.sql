-- A new pace counts its windows anew, a part at a time, beside the counters that are in use. These have another generation;
-- which one is in use stands with the newest version of the config.
ALTER TABLE rate_limit_config ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;

CREATE TABLE rate_limit_window_counter_new (
    config_name  TEXT    NOT NULL,
    generation   INTEGER NOT NULL,
    window_start INTEGER NOT NULL,
    slot_count   INTEGER NOT NULL CHECK (slot_count >= 0),
    status       TEXT    NOT NULL CHECK (status IN ('OPEN', 'CLOSED')),
    PRIMARY KEY (config_name, generation, window_start)
) WITHOUT ROWID;
INSERT INTO rate_limit_window_counter_new (config_name, generation, window_start, slot_count, status)
SELECT config_name, 0, window_start, slot_count, status FROM rate_limit_window_counter;
DROP TABLE rate_limit_window_counter;
ALTER TABLE rate_limit_window_counter_new RENAME TO rate_limit_window_counter;
CREATE INDEX rate_limit_window_counter_status
    ON rate_limit_window_counter (config_name, generation, status, window_start);

-- Generations that are not in use: being counted, or replaced and not removed yet.
CREATE TABLE rate_limit_unused_generation (
    config_name TEXT    NOT NULL,
    generation  INTEGER NOT NULL,
    PRIMARY KEY (config_name, generation)
) WITHOUT ROWID;
