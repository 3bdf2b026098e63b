-- The keys that servers seal requests with, by the names that stand beside what they sealed. Not the keys themselves: a digest to
-- tell them apart, and a known value that only the same key opens.
CREATE TABLE request_key (
    name          text COLLATE "C" PRIMARY KEY,
    digest        text        NOT NULL,
    check_value   bytea       NOT NULL,
    registered_at timestamptz NOT NULL
);
