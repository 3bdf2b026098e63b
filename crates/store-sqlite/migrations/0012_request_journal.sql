-- Keys of large batches that are not in idempotency_record yet, a batch a row (see src/request/idempotency_journal.rs). Empty when idle.
CREATE TABLE idempotency_journal (
    id      INTEGER NOT NULL PRIMARY KEY,
    entries BLOB    NOT NULL
);
