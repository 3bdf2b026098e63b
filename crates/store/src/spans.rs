//! Spans: what of a call took how long, for traces that are sampled.
//!
//! A process records spans once a sink is installed; until then nothing here does more than one atomic load. Which span
//! the current task works in is local to the task, so that whatever an engine is asked for becomes a child of the call or
//! the batch that needs it.
//!
//! Spans are begun for calls in `server/src/telemetry/request_context.rs`, for lanes in `lane.rs`, for engines in
//! `engine_calls.rs`, for events in `queue/src/publish.rs`, for downstreams and webhooks in `server/src/request/trace.rs`, for
//! AI upstreams in `server/src/gateway.rs`. A new outgoing call begins one with [`Span::begin_current`].

use std::borrow::Cow;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use weir_core::trace::{SpanId, TraceId, TraceParent};

/// Receives the spans of the process.
pub trait SpanSink: Send + Sync + 'static {
    /// Whether a trace that begins here is sampled.
    fn samples(&self, trace: TraceId) -> bool;
    /// Takes a finished span. It never waits: it drops what it has no room for.
    fn record(&self, span: FinishedSpan);
}

static SINK: OnceLock<Box<dyn SpanSink>> = OnceLock::new();

tokio::task_local! {
    static CURRENT: CurrentSpan;
}

/// The span that a task works in.
#[derive(Clone, Debug)]
enum CurrentSpan {
    None,
    Known(TraceParent),
    /// That of a batch, which has one once its commands are selected, if one of them is sampled.
    Batch(Arc<BatchSpan>),
}

/// What a span was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    /// A call that was answered.
    Server,
    /// A call that was made.
    Client,
    /// An event that was published.
    Producer,
}

#[derive(Clone, Debug)]
pub struct FinishedSpan {
    pub trace_id: TraceId,
    pub id: SpanId,
    /// Absent if the trace begins with this span.
    pub parent: Option<SpanId>,
    pub name: Cow<'static, str>,
    pub kind: SpanKind,
    pub started: SystemTime,
    pub ended: SystemTime,
    pub is_error: bool,
    pub attributes: Vec<(&'static str, Cow<'static, str>)>,
    /// Spans of other calls that this one worked for.
    pub links: Vec<TraceParent>,
}

/// A span that has begun. It ends when it is dropped.
#[derive(Debug)]
pub struct Span {
    finished: FinishedSpan,
    began: Instant,
}

/// Has every span of the process recorded. Only the first call counts; returns whether this was it.
pub fn install(sink: Box<dyn SpanSink>) -> bool {
    SINK.set(sink).is_ok()
}

#[must_use]
pub fn is_enabled() -> bool {
    SINK.get().is_some()
}

/// Whether a trace that begins here is sampled. While no spans are recorded it is: others may record theirs.
#[must_use]
pub fn samples(trace: TraceId) -> bool {
    SINK.get().is_none_or(|sink| sink.samples(trace))
}

/// The span that the current task works in; `None` outside of sampled traces.
#[must_use]
pub fn current() -> Option<TraceParent> {
    if !is_enabled() {
        return None;
    }
    CURRENT.try_with(CurrentSpan::get).ok().flatten()
}

/// Runs a future in a span, or in none.
pub fn scope<F: Future>(span: Option<TraceParent>, future: F) -> impl Future<Output = F::Output> {
    let span = span.filter(|span| span.is_sampled && is_enabled());
    CURRENT.scope(span.map_or(CurrentSpan::None, CurrentSpan::Known), future)
}

/// Runs the future of a batch in its span, if spans are recorded at all.
pub(crate) fn batch_scope<F: Future>(
    span: Option<Arc<BatchSpan>>,
    future: F,
) -> impl Future<Output = F::Output> {
    CURRENT.scope(span.map_or(CurrentSpan::None, CurrentSpan::Batch), future)
}

impl CurrentSpan {
    fn get(&self) -> Option<TraceParent> {
        match self {
            Self::None => None,
            Self::Known(span) => Some(*span),
            Self::Batch(batch) => batch.taken.get().map(|taken| taken.span),
        }
    }
}

impl Span {
    /// Begins a child of a sampled span; `None` if nothing is recorded.
    #[must_use]
    pub fn begin(parent: TraceParent, name: impl Into<Cow<'static, str>>, kind: SpanKind) -> Option<Self> {
        Self::begin_as(SpanId::from_number(fastrand::u64(..)), parent, name, kind)
    }

    /// As [`Span::begin`], for a span whose id others know.
    #[must_use]
    pub fn begin_as(
        id: SpanId,
        parent: TraceParent,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
    ) -> Option<Self> {
        Self::begin_known(parent.in_span(id), Some(parent.span_id), name, kind)
    }

    /// As [`Span::begin`], below the span that the current task works in.
    #[must_use]
    pub fn begin_current(name: impl Into<Cow<'static, str>>, kind: SpanKind) -> Option<Self> {
        current().and_then(|parent| Self::begin(parent, name, kind))
    }

    /// Begins a span that is `own`, with the parent that a caller has named, if any.
    #[must_use]
    pub fn begin_known(
        own: TraceParent,
        parent: Option<SpanId>,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
    ) -> Option<Self> {
        if !own.is_sampled || !is_enabled() {
            return None;
        }
        let (began, started) = (Instant::now(), SystemTime::now());
        let finished = FinishedSpan {
            trace_id: own.trace_id,
            id: own.span_id,
            parent,
            name: name.into(),
            kind,
            started,
            ended: started,
            is_error: false,
            attributes: Vec::new(),
            links: Vec::new(),
        };
        Some(Self { finished, began })
    }

    /// Moves the begin to an earlier time.
    #[must_use]
    pub fn since(mut self, began: Instant) -> Self {
        let earlier = self.began.saturating_duration_since(began);
        self.finished.started = self.finished.started.checked_sub(earlier).unwrap_or(self.finished.started);
        self.began = self.began.min(began);
        self
    }

    /// The span, as the parent of others.
    #[must_use]
    pub const fn id(&self) -> TraceParent {
        TraceParent { trace_id: self.finished.trace_id, span_id: self.finished.id, is_sampled: true }
    }

    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        self.finished.name = name.into();
    }

    /// Adds what is known about the span: never a secret, nor what callers send.
    pub fn describe(&mut self, attribute: &'static str, value: impl Into<Cow<'static, str>>) {
        self.finished.attributes.push((attribute, value.into()));
    }

    pub const fn fail(&mut self) {
        self.finished.is_error = true;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(sink) = SINK.get() else { return };
        let mut finished = std::mem::replace(&mut self.finished, FinishedSpan::EMPTY);
        finished.ended = finished.started + self.began.elapsed();
        sink.record(finished);
    }
}

impl FinishedSpan {
    /// Takes the place of a span that was recorded.
    const EMPTY: Self = Self {
        trace_id: TraceId::from_number(0),
        id: SpanId::from_number(0),
        parent: None,
        name: Cow::Borrowed(""),
        kind: SpanKind::Internal,
        started: SystemTime::UNIX_EPOCH,
        ended: SystemTime::UNIX_EPOCH,
        is_error: false,
        attributes: Vec::new(),
        links: Vec::new(),
    };
}

/// The span of a batch of a lane. It begins when the commands are selected, below the first sampled call among them, and is
/// linked to the other sampled ones.
#[derive(Debug, Default)]
pub(crate) struct BatchSpan {
    taken: OnceLock<TakenBatch>,
}

#[derive(Debug)]
struct TakenBatch {
    span: TraceParent,
    parent: SpanId,
    links: Vec<TraceParent>,
    commands: usize,
    at: Instant,
}

/// The most links of a batch's span.
const LINKS_MAX: usize = 128;

impl BatchSpan {
    /// One for each batch while spans are recorded.
    pub(crate) fn new() -> Option<Arc<Self>> {
        is_enabled().then(Arc::default)
    }

    /// Notes the calls of which commands were selected, and records how long each sampled one has waited.
    pub(crate) fn take<'a>(
        &self,
        lane: &'static str,
        calls: impl Iterator<Item = (Option<&'a TraceParent>, Instant)>,
    ) {
        let (mut first, mut links, mut commands) = (None, Vec::new(), 0);
        for (span, queued_at) in calls {
            commands += 1;
            let Some(span) = span else { continue };
            let wait = Span::begin(*span, format!("lane {lane} wait"), SpanKind::Internal);
            drop(wait.map(|wait| wait.since(queued_at)));
            if first.is_none() {
                first = Some(*span);
            } else if links.len() < LINKS_MAX {
                links.push(*span);
            }
        }
        let Some(first) = first else { return };
        let span = first.in_span(SpanId::from_number(fastrand::u64(..)));
        let taken = TakenBatch { span, parent: first.span_id, links, commands, at: Instant::now() };
        // A batch is taken once.
        let _ = self.taken.set(taken);
    }

    /// Records the span, if one of the calls is sampled.
    pub(crate) fn finish(&self, lane: &'static str, is_error: bool) {
        let Some(taken) = self.taken.get() else { return };
        let name = format!("lane {lane} batch");
        let span = Span::begin_known(taken.span, Some(taken.parent), name, SpanKind::Internal);
        if let Some(mut span) = span.map(|span| span.since(taken.at)) {
            span.finished.links.clone_from(&taken.links);
            span.finished.is_error = is_error;
            span.describe("weir.batch.commands", taken.commands.to_string());
        }
    }
}
