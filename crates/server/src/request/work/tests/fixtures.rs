//! An engine, a worker and a downstream.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::response::Response;
use http::HeaderMap;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::retry::{RetryBackoff, RetryPolicy};
use weir_core::request::state::RequestStatus;
use weir_core::{Clock, IdempotencyKey, RequestId, RequestType, TenantId};
use weir_store::request::{Request, RequestStore, Submit, SubmitOutcome};
use weir_store_sqlite::Sqlite;

use crate::auth::webhook::WebhookSecret;
use crate::request::encryption::{Keyring, SealedField, TextKeys};
use crate::request::metrics::WorkMetrics;
use crate::request::settings::RequestSettings;
use crate::request::stored_form::StoredForm;
use crate::request::work::{Worker, WorkerDependencies};
use crate::settings::Settings;
use crate::settings::secret::Secret;
use crate::settings::source::Sources;
use crate::settings::store::Formats;

/// The master secret of webhooks.
pub(super) const SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

/// How long a test waits for what must happen.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) struct Fixture {
    pub(super) engine: Sqlite,
    pub(super) keyring: Arc<Keyring>,
    pub(super) settings: RequestSettings,
    pub(super) metrics: WorkMetrics,
    /// Every change that was reported, in order.
    pub(super) changes: Arc<Mutex<Vec<(RequestId, RequestStatus)>>>,
    _directory: tempfile::TempDir,
}

pub(super) struct RunningWorker {
    task: JoinHandle<()>,
    closing: CancellationToken,
}

impl Fixture {
    /// An engine on the system's clock, and settings with short waits.
    pub(super) fn new(downstream: Option<&str>) -> Self {
        Self::on(downstream, |directory| Sqlite::open(directory).unwrap())
    }

    pub(super) fn with_clock(downstream: Option<&str>, clock: impl Clock) -> Self {
        Self::on(downstream, |directory| Sqlite::open_with_clock(directory, Arc::new(clock)).unwrap())
    }

    fn on(downstream: Option<&str>, open: impl FnOnce(&std::path::Path) -> Sqlite) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = Settings::read(Sources::default()).unwrap().request;
        settings.downstream.url = downstream.map(|url| url.parse().unwrap());
        settings.downstream.read_timeout = Duration::from_millis(400);
        settings.policy = RetryPolicy {
            backoff: RetryBackoff::new(Duration::from_millis(1), Duration::from_millis(5)).unwrap(),
            ..RetryPolicy::default()
        };
        let text = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=".to_owned();
        let keyring = Keyring::from_provider(&TextKeys { setting: "test", text }).unwrap();
        Self {
            engine: open(directory.path()),
            keyring: Arc::new(keyring),
            settings,
            metrics: WorkMetrics::default(),
            changes: Arc::default(),
            _directory: directory,
        }
    }

    pub(super) fn parts(&self) -> WorkerDependencies {
        let changes = Arc::clone(&self.changes);
        WorkerDependencies {
            store: Arc::new(self.engine.clone()),
            source: None,
            keyring: Arc::clone(&self.keyring),
            form: self.form(),
            clock: self.engine.clock(),
            secret: self.secret(),
            wall_clock: self.engine.clock(),
            settings: self.settings.clone(),
            metrics: self.metrics.clone(),
            is_enabled: Arc::new(|| Box::pin(std::future::ready(true))),
            on_change: Arc::new(move |id, status| changes.lock().push((id, status))),
            grace: Duration::from_secs(10),
        }
    }

    pub(super) fn secret(&self) -> WebhookSecret {
        let mut settings = self.settings.clone();
        settings.webhook_secret = Some(Secret(SECRET.to_owned()));
        WebhookSecret::load(&settings, std::path::Path::new("")).unwrap()
    }

    fn form(&self) -> Arc<StoredForm> {
        let (store, keys) = (Arc::new(self.engine.clone()), Arc::clone(&self.keyring));
        Arc::new(StoredForm::new(store, keys, Formats::Newest, TEST_TIMEOUT))
    }

    pub(super) fn start(&self) -> RunningWorker {
        RunningWorker::new(self.parts())
    }

    /// Accepts a request of type `t` for the default downstream.
    pub(super) async fn submit(&self, payload: &str) -> RequestId {
        self.submit_with(payload, |_| {}).await
    }

    pub(super) async fn submit_with(&self, payload: &str, change: impl FnOnce(&mut Submit)) -> RequestId {
        let mut submit = self.submission(payload);
        change(&mut submit);
        let id = submit.id;
        let outcomes = self.engine.submit_batch(vec![submit].into()).await.unwrap();
        assert!(matches!(outcomes[..], [SubmitOutcome::Accepted(_)]));
        id
    }

    /// A request of type `t` for the default downstream, not yet submitted.
    pub(super) fn submission(&self, payload: &str) -> Submit {
        let id = RequestId::new(self.engine.clock().now(), std::array::from_fn(|_| fastrand::u8(..)));
        Submit {
            id,
            tenant: TenantId::parse("acme").unwrap(),
            key: IdempotencyKey::parse(id.to_string()).unwrap(),
            request_type: RequestType::parse("t").unwrap(),
            fingerprint: Fingerprint::from_bytes([0; 32]),
            plain: None,
            payload: self.keyring.seal(id, SealedField::Payload, payload.as_bytes()).unwrap(),
            downstream: RequestSettings::DEFAULT_DOWNSTREAM.to_owned(),
            callback_url: None,
            trace: None,
            needs_broker: false,
            limits: None,
        }
    }

    pub(super) async fn find(&self, id: RequestId) -> Request {
        self.engine.find_request(id).await.unwrap().unwrap()
    }

    /// The request, once it is final.
    pub(super) async fn end_of(&self, id: RequestId) -> Request {
        until("the request is final", || async { self.find(id).await.status.is_final() }).await;
        self.find(id).await
    }

    pub(super) fn result(&self, request: &Request) -> Option<Vec<u8>> {
        let sealed = request.result.as_ref()?;
        Some(self.keyring.open(request.id, SealedField::Result, sealed).unwrap())
    }
}

impl RunningWorker {
    pub(super) fn new(parts: WorkerDependencies) -> Self {
        let closing = CancellationToken::new();
        Self { task: tokio::spawn(Worker::new(parts).run(closing.clone())), closing }
    }

    /// As SIGTERM does.
    pub(super) async fn stop(self) {
        self.closing.cancel();
        self.task.await.unwrap();
    }

    /// As a crash does.
    pub(super) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Waits for a condition; panics when it does not come about.
pub(super) async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TEST_TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The headers and the body of a call.
type Seen = (HeaderMap, Vec<u8>);

/// A downstream that was called.
pub(super) struct FakeDownstream {
    pub(super) url: String,
    calls: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl FakeDownstream {
    /// Answers the n-th call, from 0 on, with what `answer` makes of it.
    pub(super) async fn start<F>(answer: impl Fn(usize) -> F + Clone + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Response> + Send + 'static,
    {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = url(listener.local_addr().unwrap());
        let (calls, seen) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<_>>>::default());
        let (count, saw) = (Arc::clone(&calls), Arc::clone(&seen));
        let handle = move |request: HttpRequest| async move {
            let n = count.fetch_add(1, Ordering::SeqCst);
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes().to_vec();
            saw.lock().push((head.headers, body));
            answer(n).await
        };
        let router = Router::new().fallback(handle);
        tokio::spawn(async move { axum_serve(listener, router).await });
        Self { url, calls, seen }
    }

    /// Answers every call like this.
    pub(super) async fn always(status: u16, body: &'static str) -> Self {
        Self::start(move |_| async move { answer(status, body) }).await
    }

    pub(super) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// The n-th call.
    pub(super) fn seen(&self, n: usize) -> Seen {
        self.seen.lock()[n].clone()
    }
}

pub(super) fn url(address: SocketAddr) -> String {
    format!("http://{address}/work")
}

pub(super) fn answer(status: u16, body: &'static str) -> Response {
    Response::builder().status(status).body(Body::from(body)).unwrap()
}

async fn axum_serve(listener: tokio::net::TcpListener, router: Router) {
    while let Ok((stream, _)) = listener.accept().await {
        let service = hyper_util::service::TowerToHyperService::new(router.clone());
        let io = hyper_util::rt::TokioIo::new(stream);
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service).into_future());
    }
}
