//! Exports the spans of sampled traces to a collector: OTLP over HTTP.
//!
//! Spans wait in a queue of fixed size, from which one task sends them in batches. What finds no room is dropped and counted.
//! A collector that is slow, or away, delays no answer, and a stop by [`STOP_TIMEOUT`] at most.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Request, Response};
use opentelemetry::trace::{Link, SpanContext, SpanKind as OtlpKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceId};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter as OtlpExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter, SpanLinks};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use weir_core::trace::{self, TraceParent};
use weir_store::spans::{self, FinishedSpan, SpanKind, SpanSink};

use super::log_throttle::LogThrottle;
use super::metrics::Metrics;
use crate::outbound::{OutboundClient, OutboundLimits, OutboundTarget, Reach};
use crate::settings::source::SettingError;
use crate::settings::traces::{SampleRatio, TraceSettings};

/// Spans that wait to be sent.
const QUEUE_MAX: usize = 8_192;
/// Spans in one call of the collector.
const BATCH_MAX: usize = 512;
/// How long a batch waits for more spans.
const LINGER: Duration = Duration::from_secs(1);
/// How long the collector may take, with retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a stop waits for the last spans to be sent.
const STOP_TIMEOUT: Duration = Duration::from_millis(250);
/// The largest response of a collector that is read.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;

/// The task that sends spans.
pub(crate) struct SpanExport {
    task: JoinHandle<()>,
    stopping: CancellationToken,
}

/// Starts to record and send spans if the settings name a collector. A process has one collector: where it runs several
/// servers, as tests do, that of the first one.
/// Fails when the settings of the collector cannot be used.
pub(crate) fn start(settings: &TraceSettings, metrics: &Metrics) -> Result<Option<SpanExport>, SettingError> {
    let Some(collector) = &settings.otlp_endpoint else { return Ok(None) };
    // Without user and password.
    let host = collector.host_str().unwrap_or_default();
    let unusable = |reason: String| SettingError::unusable("traces.otlp_endpoint", host, reason);
    let target = OutboundTarget::new(collector);
    let target = target.ok_or_else(|| unusable("it is not a valid URL".to_owned()))?;
    let limits = OutboundLimits {
        connect_timeout: EXPORT_TIMEOUT / 2,
        read_timeout: EXPORT_TIMEOUT,
        body_max: RESPONSE_BYTES_MAX,
        idle_max: 1,
    };
    let client = CollectorClient { client: OutboundClient::new(Reach::Anywhere, limits), target };
    let exporter = OtlpExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(client.target.uri().to_string())
        .with_timeout(EXPORT_TIMEOUT)
        .with_http_client(client)
        .build();
    let mut exporter = exporter.map_err(|error| unusable(error.to_string()))?;
    let resource = Resource::builder()
        .with_service_name(settings.service_name.clone())
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    exporter.set_resource(&resource);
    let (sender, queue) = mpsc::channel(QUEUE_MAX);
    let sink = QueueSink { queue: sender, ratio: settings.sample_ratio, dropped: metrics.spans("dropped") };
    if !spans::install(Box::new(sink)) {
        return Ok(None);
    }
    let stopping = CancellationToken::new();
    let worker = ExportWorker {
        exporter,
        scope: InstrumentationScope::builder("weir").build(),
        exported: metrics.spans("exported"),
        failed: metrics.spans("failed"),
    };
    let task = tokio::spawn(worker.run(queue, stopping.clone()));
    Ok(Some(SpanExport { task, stopping }))
}

impl SpanExport {
    /// Sends what still waits, as far as the collector takes it within [`STOP_TIMEOUT`].
    pub(crate) async fn stop(mut self) {
        self.stopping.cancel();
        if tokio::time::timeout(STOP_TIMEOUT, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// Puts spans into the queue.
struct QueueSink {
    queue: mpsc::Sender<FinishedSpan>,
    ratio: SampleRatio,
    dropped: Counter,
}

impl SpanSink for QueueSink {
    fn samples(&self, trace: trace::TraceId) -> bool {
        self.ratio.includes(trace)
    }

    fn record(&self, span: FinishedSpan) {
        if self.queue.try_send(span).is_err() {
            self.dropped.inc();
        }
    }
}

struct ExportWorker {
    exporter: OtlpExporter,
    scope: InstrumentationScope,
    exported: Counter,
    failed: Counter,
}

impl ExportWorker {
    async fn run(self, mut queue: mpsc::Receiver<FinishedSpan>, stopping: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while !stopping.is_cancelled() {
            let filled = fill(&mut batch, &mut queue);
            if stopping.run_until_cancelled(filled).await.is_some() {
                self.export(&mut batch).await;
            }
        }
        loop {
            while batch.len() < BATCH_MAX
                && let Ok(span) = queue.try_recv()
            {
                batch.push(span);
            }
            if batch.is_empty() {
                return;
            }
            self.export(&mut batch).await;
        }
    }

    async fn export(&self, batch: &mut Vec<FinishedSpan>) {
        let count = batch.len() as u64;
        let spans = batch.drain(..).map(|span| span_data(span, &self.scope)).collect();
        let exported = tokio::time::timeout(EXPORT_TIMEOUT, self.exporter.export(spans)).await;
        let problem = match exported {
            Ok(Ok(())) => {
                self.exported.inc_by(count);
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_elapsed) => "there was no answer in time".to_owned(),
        };
        SpansLost { count, problem }.emit(&self.failed);
    }
}

/// The collector did not take spans. During an outage every batch is lost, so the line is written at most once a second.
struct SpansLost {
    count: u64,
    problem: String,
}

impl SpansLost {
    fn emit(self, failed: &Counter) {
        static OUTAGE: LogThrottle = LogThrottle::new();
        let Self { count, problem } = self;
        failed.inc_by(count);
        if let Some(suppressed) = OUTAGE.permit() {
            tracing::warn!(
                error = problem,
                spans = count,
                suppressed,
                "cannot send spans to the collector (traces.otlp_endpoint); they are lost"
            );
        }
    }
}

/// Waits for the first span, then for others until the batch is full or [`LINGER`] is over.
async fn fill(batch: &mut Vec<FinishedSpan>, queue: &mut mpsc::Receiver<FinishedSpan>) {
    if batch.is_empty() && queue.recv_many(batch, BATCH_MAX).await == 0 {
        // The sink is never dropped, so there is always a sender.
        return std::future::pending().await;
    }
    let more = async {
        while batch.len() < BATCH_MAX {
            let room = BATCH_MAX - batch.len();
            queue.recv_many(batch, room).await;
        }
    };
    let _ = tokio::time::timeout(LINGER, more).await;
}

/// Calls the collector.
#[derive(Debug)]
struct CollectorClient {
    client: OutboundClient,
    target: OutboundTarget,
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let answer = self.client.post(&self.target, parts.headers, body).await?;
        let mut response = Response::builder().status(answer.status);
        if let Some(after) = answer.retry_after {
            response = response.header(RETRY_AFTER, after.as_secs());
        }
        Ok(response.body(answer.body)?)
    }
}

fn span_data(span: FinishedSpan, scope: &InstrumentationScope) -> SpanData {
    let own = TraceParent { trace_id: span.trace_id, span_id: span.id, is_sampled: true };
    let kind = match span.kind {
        SpanKind::Internal => OtlpKind::Internal,
        SpanKind::Server => OtlpKind::Server,
        SpanKind::Client => OtlpKind::Client,
        SpanKind::Producer => OtlpKind::Producer,
    };
    let attributes = span.attributes.into_iter().map(|(name, value)| KeyValue::new(name, value)).collect();
    let links = span.links.into_iter().map(|link| Link::new(context(link), Vec::new(), 0)).collect();
    SpanData {
        span_context: context(own),
        parent_span_id: span.parent.map_or(SpanId::INVALID, |parent| SpanId::from_bytes(parent.to_bytes())),
        // Only the caller's span may be of another process.
        parent_span_is_remote: kind == OtlpKind::Server,
        span_kind: kind,
        name: span.name,
        start_time: span.started,
        end_time: span.ended,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: span_links(links),
        status: if span.is_error { Status::error("") } else { Status::Unset },
        instrumentation_scope: scope.clone(),
    }
}

fn span_links(all: Vec<Link>) -> SpanLinks {
    let mut links = SpanLinks::default();
    links.links = all;
    links
}

fn context(parent: TraceParent) -> SpanContext {
    let trace_id = TraceId::from_bytes(parent.trace_id.to_bytes());
    let span_id = SpanId::from_bytes(parent.span_id.to_bytes());
    SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE)
}
