-- A cancelled request has the status FAILED_PERMANENT and is_cancelled: another status would need a copy of the table, whose CHECK
-- names all of them.
ALTER TABLE request_record ADD COLUMN is_cancelled INTEGER;
