-- The queue: messages in order of id within a topic. A row is here until it is done or dead.
CREATE TABLE queue_message (
    topic         TEXT    NOT NULL,
    id            INTEGER NOT NULL,
    key           TEXT    NOT NULL,
    payload       BLOB    NOT NULL,
    attempts      INTEGER NOT NULL DEFAULT 0,
    delayed_until INTEGER, -- only after a retry
    PRIMARY KEY (topic, id)
) WITHOUT ROWID;

-- What could not be delivered, with its old place in the queue.
CREATE TABLE dead_letter (
    id         TEXT    NOT NULL PRIMARY KEY,
    topic      TEXT    NOT NULL,
    message_id INTEGER NOT NULL,
    key        TEXT    NOT NULL,
    payload    BLOB    NOT NULL,
    reason     TEXT    NOT NULL,
    attempts   INTEGER NOT NULL,
    died_at    INTEGER NOT NULL
) WITHOUT ROWID;

-- The books: accepted = done + discarded + rows of dead_letter + rows of queue_message.
CREATE TABLE queue_ledger (
    topic     TEXT    NOT NULL PRIMARY KEY,
    accepted  INTEGER NOT NULL DEFAULT 0,
    done      INTEGER NOT NULL DEFAULT 0,
    discarded INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
