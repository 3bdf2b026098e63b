-- The keys that servers seal requests with, by the names that stand beside what they sealed. Not the keys themselves: a digest to
-- tell them apart, and a known value that only the same key opens.
CREATE TABLE request_key (
    name          TEXT    NOT NULL PRIMARY KEY,
    digest        TEXT    NOT NULL,
    check_value   BLOB    NOT NULL,
    registered_at INTEGER NOT NULL
) WITHOUT ROWID;
