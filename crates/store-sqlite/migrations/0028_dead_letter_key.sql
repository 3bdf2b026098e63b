-- Dead webhooks are found by their request, and still counted by their topic.
DROP INDEX dead_letter_topic;
CREATE INDEX dead_letter_key ON dead_letter (topic, key);
