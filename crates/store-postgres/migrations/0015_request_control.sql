-- A cancelled request has the status FAILED_PERMANENT and is_cancelled: a server of the version before knows no other final status
-- and refuses its workers' reports all the same.
ALTER TABLE request_record ADD COLUMN is_cancelled boolean;
