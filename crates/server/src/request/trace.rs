//! The trace of a request: the one that it was accepted in, for its calls, webhooks and log lines, whenever they come.
//!
//! A request that a server of an earlier version has accepted has none. Its id takes the place of the trace id then: both have
//! 16 bytes, and so all of its calls are in one trace.

use http::HeaderMap;
use weir_core::RequestId;
use weir_core::trace::{SpanId, TraceContext, TraceId, TraceParent};
use weir_store::spans::{Span, SpanKind};

use crate::telemetry::request_context::write_stored;

pub(super) fn trace_id(id: RequestId, stored: Option<&TraceContext>) -> TraceId {
    stored.map_or_else(|| TraceId::from_number(id.as_uuid().as_u128()), |trace| trace.parent.trace_id)
}

/// Begins the span of a call about a request, if its trace is sampled.
pub(super) fn begin_call(stored: Option<&TraceContext>, name: &'static str, id: RequestId) -> Option<Span> {
    let mut span = Span::begin(stored?.parent, name, SpanKind::Client)?;
    span.describe("weir.request_id", id.to_string());
    Some(span)
}

/// Writes the trace into the headers of a call about a request. `span` is that of the call, if it is recorded.
pub(super) fn write_headers(
    headers: &mut HeaderMap,
    id: RequestId,
    stored: Option<&TraceContext>,
    span: Option<&Span>,
) {
    match stored {
        Some(trace) => write_stored(headers, trace, span),
        None => {
            let parent = TraceParent::begin(trace_id(id, None), SpanId::from_number(0));
            write_stored(headers, &TraceContext { parent, state: None }, span);
        }
    }
}

#[cfg(test)]
mod tests {
    use weir_core::Timestamp;

    use super::*;

    fn sent(id: RequestId, stored: Option<&TraceContext>) -> (TraceParent, HeaderMap) {
        let mut headers = HeaderMap::new();
        write_headers(&mut headers, id, stored, None);
        (TraceParent::parse(headers["traceparent"].as_bytes()).unwrap(), headers)
    }

    #[test]
    fn calls_go_on_with_the_stored_trace_in_spans_of_their_own() {
        let id = RequestId::new(Timestamp::EPOCH, [1; 10]);
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        let stored = TraceContext::stored(Some(parent), Some("a=1")).unwrap();
        let (first, headers) = sent(id, Some(&stored));
        let (second, _) = sent(id, Some(&stored));
        assert_eq!((first.trace_id, first.is_sampled), (stored.parent.trace_id, false));
        assert_eq!(second.trace_id, first.trace_id);
        assert!(first.span_id != stored.parent.span_id && first.span_id != second.span_id);
        assert_eq!(headers["tracestate"], "a=1");
    }

    #[test]
    fn calls_of_a_request_without_a_trace_are_in_one_named_by_its_id() {
        let id = RequestId::new(Timestamp::EPOCH, [1; 10]);
        let (first, headers) = sent(id, None);
        let (second, _) = sent(id, None);
        assert_eq!(first.trace_id.to_string(), id.to_string().replace('-', ""));
        assert_eq!(first.trace_id, second.trace_id);
        assert_ne!(first.span_id, second.span_id);
        assert!(!headers.contains_key("tracestate"));
    }
}
