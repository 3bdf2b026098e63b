-- Counts of large batches that are not in rate_limit_store yet, a batch a row (see src/journal.rs). Empty when idle.
CREATE TABLE quota_journal (
    id      INTEGER NOT NULL PRIMARY KEY,
    entries BLOB    NOT NULL
);
