-- Messages that were enqueued together, a row for all of them (see src/queue/pack.rs), in order of id with queue_message.
-- What happens to one of them alone makes rows of queue_message of them all.
CREATE TABLE queue_pack (
    topic    TEXT    NOT NULL,
    first_id INTEGER NOT NULL,
    count    INTEGER NOT NULL CHECK (count >= 1),
    messages BLOB    NOT NULL,
    PRIMARY KEY (topic, first_id)
) WITHOUT ROWID;
