//! The trace and the HTTP id of the call that the current task answers: for log lines, and for the calls that it leads to.
//!
//! The context is local to the task, so that whatever logs the cause of a response finds the response's ids. A task that a
//! handler spawns has none, unless it is wrapped in [`inherit`].

use std::sync::OnceLock;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tracing::field::DisplayValue;
use weir_core::trace::{SpanId, TRACESTATE_BYTES_MAX, TraceContext, TraceId, TraceParent};
use weir_store::spans::{self, Span, SpanKind};

use super::labels::method_label;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

tokio::task_local! {
    static CURRENT: RequestContext;
}

/// A call that is being answered.
#[derive(Clone, Debug)]
pub(crate) struct RequestContext {
    http_request_id: HeaderValue,
    /// The caller's trace, or a new one, in the span of this call.
    parent: TraceParent,
    /// The span that the caller names.
    remote: Option<SpanId>,
    state: Option<HeaderValue>,
    caller: OnceLock<Caller>,
}

/// Who makes a call that changes something, for its log line.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// The scope of the token that admitted the call; `None` for the operator's key.
    pub(crate) scope: Option<&'static str>,
    /// The tenant that the token names.
    pub(crate) tenant: Option<Box<str>>,
}

/// The ids that log lines carry; absent outside of a call.
#[derive(Clone, Debug)]
pub(crate) struct LogIds(Option<RequestContext>);

impl RequestContext {
    /// Goes on with the trace of a caller's headers, or begins one if they name none.
    #[must_use]
    pub(crate) fn new(headers: &HeaderMap, http_request_id: HeaderValue) -> Self {
        let span = random_span();
        let (parent, remote, state) = match read_parent(headers) {
            Some(parent) => (parent.in_span(span), Some(parent.span_id), read_state(headers)),
            None => {
                let trace = TraceId::from_number(fastrand::u128(..));
                let begun = TraceParent::begin(trace, span);
                (TraceParent { is_sampled: spans::samples(trace), ..begun }, None, None)
            }
        };
        Self { http_request_id, parent, remote, state, caller: OnceLock::new() }
    }

    /// Begins the span of this call, if it is sampled and spans are recorded.
    #[must_use]
    pub(crate) fn begin_span(&self, method: &Method, route: &'static str) -> Option<Span> {
        let mut span = Span::begin_known(self.parent, self.remote, "", SpanKind::Server)?;
        span.rename(format!("{} {route}", method_label(method)));
        span.describe("http.request.method", method_label(method));
        span.describe("http.route", route);
        span.describe("weir.http_request_id", self.http_request_id.to_str().unwrap_or_default().to_owned());
        Some(span)
    }

    /// The context of the current task.
    #[must_use]
    pub(crate) fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// The trace of the current task, to be kept with what the call begins.
    #[must_use]
    pub(crate) fn current_trace() -> Option<TraceContext> {
        CURRENT.try_with(Self::to_stored).ok()
    }

    /// Runs a future in this context.
    pub(crate) fn scope<F: Future>(self, future: F) -> impl Future<Output = F::Output> {
        let parent = self.parent;
        spans::scope(Some(parent), CURRENT.scope(self, future))
    }

    #[must_use]
    pub(crate) const fn trace_id(&self) -> TraceId {
        self.parent.trace_id
    }

    fn to_stored(&self) -> TraceContext {
        let state = self.state.as_ref().and_then(|state| state.to_str().ok());
        TraceContext { parent: self.parent, state: state.map(Into::into) }
    }

    /// Writes the trace into the headers of a call that this one leads to, and that `span` is about if it is recorded.
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap, span: Option<&Span>) {
        write_headers(headers, self.parent, self.state.clone(), span);
    }
}

impl LogIds {
    #[must_use]
    pub(crate) fn current() -> Self {
        Self(RequestContext::current())
    }

    /// The `X-Request-Id` of the response.
    #[must_use]
    pub(crate) fn http_request_id(&self) -> Option<&str> {
        self.0.as_ref().and_then(|context| context.http_request_id.to_str().ok())
    }

    /// By what the caller was admitted: the scope of a token, the operator's key, or nothing.
    #[must_use]
    pub(crate) fn caller_scope(&self) -> Option<&'static str> {
        let context = self.0.as_ref()?;
        Some(context.caller.get().map_or("none", |caller| caller.scope.unwrap_or("admin key")))
    }

    /// The tenant that the caller's token names.
    #[must_use]
    pub(crate) fn caller_tenant(&self) -> Option<&str> {
        self.0.as_ref()?.caller.get()?.tenant.as_deref()
    }

    #[must_use]
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.0.as_ref().map(|context| tracing::field::display(context.trace_id()))
    }
}

/// Remembers who makes the call that the current task answers.
pub(crate) fn set_caller(caller: Caller) {
    let _ = CURRENT.try_with(|context| context.caller.set(caller));
}

/// Runs a future that is to be spawned in the context of the task that spawns it.
pub(crate) fn inherit<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let context = RequestContext::current();
    async move {
        match context {
            Some(context) => context.scope(future).await,
            None => future.await,
        }
    }
}

/// Writes a stored trace into the headers of an outgoing call.
pub(crate) fn write_stored(headers: &mut HeaderMap, trace: &TraceContext, span: Option<&Span>) {
    let state = trace.state.as_ref().and_then(|state| HeaderValue::from_str(state).ok());
    write_headers(headers, trace.parent, state, span);
}

/// Each outgoing call is a span of its own.
fn write_headers(
    headers: &mut HeaderMap,
    parent: TraceParent,
    state: Option<HeaderValue>,
    span: Option<&Span>,
) {
    let own = span.map_or_else(random_span, |span| span.id().span_id);
    // Hexadecimal digits are always a header's value.
    if let Ok(value) = HeaderValue::from_bytes(&parent.in_span(own).to_bytes()) {
        headers.insert(TRACEPARENT, value);
    }
    match state {
        Some(state) => drop(headers.insert(TRACESTATE, state)),
        None => drop(headers.remove(TRACESTATE)),
    }
}

fn random_span() -> SpanId {
    SpanId::from_number(fastrand::u64(..))
}

/// The specification has a header ignored that is malformed or there twice.
fn read_parent(headers: &HeaderMap) -> Option<TraceParent> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let first = values.next()?;
    if values.next().is_some() { None } else { TraceParent::parse(first.as_bytes()) }
}

/// The `tracestate`, which may come in several headers; `None` if it is too long or not text.
fn read_state(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut values = headers.get_all(TRACESTATE).iter();
    let first = values.next()?;
    let state = match values.next() {
        None => first.clone(),
        Some(_) => {
            let all: Vec<&[u8]> = headers.get_all(TRACESTATE).iter().map(HeaderValue::as_bytes).collect();
            HeaderValue::from_bytes(&all.join(&b","[..])).ok()?
        }
    };
    let is_text = state.to_str().is_ok_and(|text| (1..=TRACESTATE_BYTES_MAX).contains(&text.len()));
    is_text.then_some(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn context(headers: &[(HeaderName, &str)]) -> RequestContext {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, HeaderValue::from_str(value).unwrap());
        }
        RequestContext::new(&map, HeaderValue::from_static("r-1"))
    }

    fn traceparent() -> String {
        format!("00-{TRACE}-00f067aa0ba902b7-00")
    }

    #[test]
    fn a_trace_goes_on_in_a_span_of_each_call() {
        let context = context(&[(TRACEPARENT, &traceparent()), (TRACESTATE, "a=1"), (TRACESTATE, "b=2")]);
        let mut spans = vec![traceparent()];
        for _ in 0..2 {
            let mut headers = HeaderMap::from_iter([(TRACESTATE, HeaderValue::from_static("c=3"))]);
            context.write_headers(&mut headers, None);
            let parent = headers[TRACEPARENT].to_str().unwrap().to_owned();
            assert!(parent.starts_with(&format!("00-{TRACE}-")) && parent.ends_with("-00"), "{parent}");
            assert!(!spans.contains(&parent), "{parent} is a new span");
            assert_eq!(headers[TRACESTATE], "a=1,b=2");
            spans.push(parent);
        }
    }

    #[test]
    fn without_a_usable_header_a_trace_begins_and_no_state_is_passed_on() {
        let malformed = traceparent().to_uppercase();
        let (first, second) = (traceparent(), traceparent());
        for headers in [
            vec![(TRACESTATE, "a=1")],
            vec![(TRACEPARENT, malformed.as_str()), (TRACESTATE, "a=1")],
            vec![(TRACEPARENT, first.as_str()), (TRACEPARENT, second.as_str()), (TRACESTATE, "a=1")],
        ] {
            let (one, other) = (context(&headers), context(&headers));
            assert_ne!(one.trace_id().to_string(), TRACE, "{headers:?}");
            assert_ne!(one.trace_id(), other.trace_id());
            let mut sent = HeaderMap::from_iter([(TRACESTATE, HeaderValue::from_static("a=1"))]);
            one.write_headers(&mut sent, None);
            assert!(!sent.contains_key(TRACESTATE), "{sent:?}");
        }
    }

    #[test]
    fn a_state_that_is_too_long_or_empty_is_left_out() {
        let state =
            |text: &str| context(&[(TRACEPARENT, &traceparent()), (TRACESTATE, text)]).to_stored().state;
        let longest = "x".repeat(TRACESTATE_BYTES_MAX);
        assert_eq!(state(&longest).as_deref(), Some(longest.as_str()));
        assert_eq!(state(&format!("{longest}x")), None);
        assert_eq!(state(""), None);
    }

    #[tokio::test]
    async fn a_spawned_task_has_the_ids_of_its_call_only_if_it_inherits_them() {
        async fn ids() -> Option<String> {
            LogIds::current().http_request_id().map(str::to_owned)
        }
        let call = async {
            let inherited = tokio::spawn(inherit(ids())).await.unwrap();
            let alone = tokio::spawn(ids()).await.unwrap();
            (ids().await, inherited, alone)
        };
        let own = Some("r-1".to_owned());
        assert_eq!(context(&[]).scope(call).await, (own.clone(), own, None));
        assert_eq!(ids().await, None);
    }
}
