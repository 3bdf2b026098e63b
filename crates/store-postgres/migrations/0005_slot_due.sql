-- Slots that are to be dispatched when their time comes. Written only while slot.dispatch.topic is set.
CREATE TABLE rate_limit_event_due (
    scheduled_time timestamptz NOT NULL,
    event_id       text COLLATE "C" NOT NULL,
    PRIMARY KEY (scheduled_time, event_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
