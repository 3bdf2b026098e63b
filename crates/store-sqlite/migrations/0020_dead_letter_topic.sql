-- Dead letters are counted by topic, for gauges that are read every few seconds.
CREATE INDEX dead_letter_topic ON dead_letter (topic);
