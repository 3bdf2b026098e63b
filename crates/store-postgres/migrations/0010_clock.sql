-- When a message was put off, when a lease was given, and when what a key has spent was written down: a time that is still to
-- come says that the clock has been set back since. Columns without a default, so no table is rewritten.
ALTER TABLE queue_message ADD COLUMN delayed_at timestamptz;
ALTER TABLE queue_shard ADD COLUMN leased_at timestamptz;
ALTER TABLE tier_spent ADD COLUMN saved_at timestamptz;
