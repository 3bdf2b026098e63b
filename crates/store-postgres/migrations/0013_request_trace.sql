-- The trace that a request belongs to, as W3C Trace Context writes it: the traceparent of the span that accepted the request, and
-- the caller's tracestate. NULL for requests of servers of the version before, which name the columns that they write.
ALTER TABLE request_record ADD COLUMN traceparent text, ADD COLUMN tracestate text;
