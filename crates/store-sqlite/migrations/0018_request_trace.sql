-- The trace that a request belongs to, as W3C Trace Context writes it: the traceparent of the span that accepted the request, and
-- the caller's tracestate. NULL for requests from before this column.
ALTER TABLE request_record ADD COLUMN traceparent TEXT;
ALTER TABLE request_record ADD COLUMN tracestate TEXT;
