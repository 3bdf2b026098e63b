//! A collector of traces: an HTTP server that decodes what exporters send by OTLP, behind a faulty network.

use std::io;
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::proxy::Proxy;

/// A running collector. Dropping it stops the server.
pub struct Collector {
    network: Proxy,
    received: Arc<Mutex<Vec<ReceivedSpan>>>,
    task: JoinHandle<()>,
}

/// A span as it was received, with its ids in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedSpan {
    /// The name of the service that sent it.
    pub service: String,
    pub trace: String,
    pub id: String,
    /// Empty if the trace begins with this span.
    pub parent: String,
    pub name: String,
    /// As the protocol numbers them: 1 internal, 2 server, 3 client, 4 producer.
    pub kind: i32,
    pub is_error: bool,
    /// The spans that this one is linked to.
    pub links: Vec<String>,
    pub attributes: Vec<(String, String)>,
    /// From its start to its end.
    pub nanos: (u64, u64),
}

impl Collector {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let network = Proxy::start(listener.local_addr().expect("an address")).await;
        let received = Arc::default();
        let task = tokio::spawn({
            let received = Arc::clone(&received);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(serve(stream, Arc::clone(&received)));
                }
            }
        });
        Self { network, received, task }
    }

    /// The endpoint for exporters.
    pub fn url(&self) -> String {
        format!("http://{}", self.network.addr())
    }

    /// The network between exporters and the collector.
    pub fn network(&self) -> &Proxy {
        &self.network
    }

    /// The spans of one trace, in the order of their arrival.
    pub fn spans_of(&self, trace: &str) -> Vec<ReceivedSpan> {
        self.received.lock().iter().filter(|span| span.trace == trace).cloned().collect()
    }

    /// All spans.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        self.received.lock().clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answers the calls on one connection.
async fn serve(stream: TcpStream, received: Arc<Mutex<Vec<ReceivedSpan>>>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut request_line, mut line, mut length) = (String::new(), String::new(), 0);
        stream.read_line(&mut request_line).await?;
        if request_line.is_empty() {
            return Ok(());
        }
        while line != "\r\n" {
            line.clear();
            stream.read_line(&mut line).await?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        assert!(request_line.starts_with("POST /v1/traces "), "{request_line}");
        let request = ExportTraceServiceRequest::decode(&*body).expect("an export of traces");
        received.lock().extend(read(request));
        // An empty message says that everything was accepted.
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
    }
}

fn read(request: ExportTraceServiceRequest) -> Vec<ReceivedSpan> {
    let mut all = Vec::new();
    for resource_spans in request.resource_spans {
        let attributes =
            resource_spans.resource.map(|resource| texts(&resource.attributes)).unwrap_or_default();
        let service = attributes.into_iter().find(|(name, _)| name == "service.name").expect("a name").1;
        for span in resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            all.push(read_span(&service, span));
        }
    }
    all
}

fn read_span(service: &str, span: Span) -> ReceivedSpan {
    ReceivedSpan {
        service: service.to_owned(),
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name,
        kind: span.kind,
        is_error: span.status.is_some_and(|status| status.code == 2),
        links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
        attributes: texts(&span.attributes),
        nanos: (span.start_time_unix_nano, span.end_time_unix_nano),
    }
}

/// The attributes that are text.
fn texts(attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue]) -> Vec<(String, String)> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => Some(text.clone()),
        _ => None,
    };
    let values = attributes.iter().filter_map(|attribute| {
        let value = attribute.value.as_ref()?.value.as_ref()?;
        Some((attribute.key.clone(), text(value)?))
    });
    values.collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
