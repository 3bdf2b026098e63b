-- How often a cache in front of rate_limit_store was distrusted: servers use nothing that was cached under an earlier
-- number. One row.
CREATE TABLE quota_cache (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    epoch   bigint  NOT NULL
);
INSERT INTO quota_cache (epoch) VALUES (1);
