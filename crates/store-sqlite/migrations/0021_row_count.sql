-- How many rows the audited tables have, by kind (see src/book.rs). Triggers, which the engine creates when it opens, count each row
-- in the transaction that writes it.
CREATE TABLE row_count (
    table_name TEXT    NOT NULL,
    kind       TEXT    NOT NULL,
    amount     INTEGER NOT NULL,
    PRIMARY KEY (table_name, kind)
) WITHOUT ROWID;

-- The last time that all rows were read and compared with the books. `claimed_at` is when that was last begun.
CREATE TABLE recount (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    claimed_at    INTEGER NOT NULL,
    started_at    INTEGER,
    finished_at   INTEGER,
    above_maximum INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE recount_difference (
    number INTEGER PRIMARY KEY,
    book   TEXT NOT NULL,
    what   TEXT NOT NULL
);
