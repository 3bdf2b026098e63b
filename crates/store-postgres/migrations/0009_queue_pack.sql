-- Messages that were enqueued together, a row for those of each shard (see src/queue/pack.rs), in order of id with
-- queue_message. What happens to one of them alone makes rows of queue_message of them all. Packs are made so short that none
-- leaves its page.
CREATE TABLE queue_pack (
    topic    text COLLATE "C" NOT NULL,
    shard    smallint NOT NULL,
    first_id bigint   NOT NULL, -- the others follow without a gap
    count    integer  NOT NULL CHECK (count BETWEEN 1 AND 1024),
    messages bytea    NOT NULL,
    PRIMARY KEY (topic, shard, first_id)
) WITH (toast_tuple_target = 8160,
        autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE queue_pack ALTER COLUMN messages SET STORAGE EXTERNAL;

-- An id that is taken stands for as many as a pack may hold.
ALTER TABLE queue_message ALTER COLUMN id SET INCREMENT BY 1024;
