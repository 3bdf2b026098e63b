-- What keys have spent that is not in tier_spent yet, a batch a row (see src/tier/spent.rs). Empty when idle.
CREATE TABLE tier_spent_journal (
    id      INTEGER NOT NULL PRIMARY KEY,
    entries BLOB    NOT NULL
);
