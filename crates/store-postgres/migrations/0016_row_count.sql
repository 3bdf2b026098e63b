-- How many rows the audited tables have, by kind: the sum of the amounts (see src/book.rs). Triggers add what each statement has
-- changed, in its transaction. Nobody waits for anybody: rows are only added, and servers replace many by their sum.
CREATE TABLE row_count (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    table_name text COLLATE "C" NOT NULL,
    kind       text COLLATE "C" NOT NULL,
    amount     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

-- Tables whose rows from before their triggers are counted, too.
CREATE TABLE row_count_complete (
    table_name text COLLATE "C" PRIMARY KEY
);

-- The last time that all rows were read and compared with the books. `claimed_at` is when a server last began.
CREATE TABLE recount (
    id            smallint    PRIMARY KEY CHECK (id = 1),
    claimed_at    timestamptz NOT NULL,
    started_at    timestamptz,
    finished_at   timestamptz,
    above_maximum bigint      NOT NULL DEFAULT 0
);
CREATE TABLE recount_difference (
    number integer PRIMARY KEY,
    book   text    NOT NULL,
    what   text    NOT NULL
);
