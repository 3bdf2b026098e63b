-- How often a cache in front of rate_limit_store was distrusted: servers use nothing that was cached under an earlier
-- number. One row. It starts at random, so that two deployments that share a cache by mistake do not share a number.
CREATE TABLE quota_cache (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    epoch   bigint  NOT NULL
);
INSERT INTO quota_cache (epoch) VALUES (1 + floor(random() * 1000000000)::bigint);

-- Users whose limits have changed and whose entry in the cache may not be deleted yet.
CREATE TABLE quota_cache_forget (
    user_id text COLLATE "C" PRIMARY KEY
);
