-- Slots that are to be dispatched when their time comes. Written only while slot.dispatch.topic is set.
CREATE TABLE rate_limit_event_due (
    scheduled_time INTEGER NOT NULL,
    event_id       TEXT    NOT NULL,
    PRIMARY KEY (scheduled_time, event_id)
) WITHOUT ROWID;
