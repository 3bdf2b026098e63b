-- What a cache holds in advance counts against the limit and was not sent. Servers of before count `current_count` alone: the
-- constraint refuses what they would allow beyond the limit (see docs/upgrades.md).
ALTER TABLE rate_limit_store
    ADD COLUMN reserved_count integer NOT NULL DEFAULT 0,
    ADD CONSTRAINT rate_limit_store_reserved CHECK (
        reserved_count = 0 OR reserved_count > 0 AND current_count <= rate_limit - reserved_count) NOT VALID;
