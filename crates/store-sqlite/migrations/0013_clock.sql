-- When a message was put off, and when what a key has spent was written down: a time that is still to come says that the clock
-- has been set back since.
ALTER TABLE queue_message ADD COLUMN delayed_at INTEGER;
ALTER TABLE tier_spent ADD COLUMN saved_at INTEGER;
CREATE INDEX queue_message_delayed_at ON queue_message (delayed_at) WHERE delayed_at IS NOT NULL;
