//! A downstream that can be degraded: then it takes long, and fails for a fifth of the calls.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

const FAST: Duration = Duration::from_millis(2);
const SLOW: Duration = Duration::from_millis(500);
/// One of so many calls fails. Fewer than would open the breaker, which opens after ten in a row.
const FAILURES: u64 = 5;

pub(super) struct Downstream {
    url: String,
    state: Arc<State>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    is_degraded: AtomicBool,
    calls: AtomicU64,
    answered: AtomicU64,
}

impl Downstream {
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for calls")?;
        let url = format!("http://{}/", listener.local_addr()?);
        let state = Arc::<State>::default();
        let task = tokio::spawn(serve(listener, Arc::clone(&state)));
        Ok(Self { url, state, task })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn degrade(&self) {
        self.state.is_degraded.store(true, Ordering::Relaxed);
    }

    pub(super) fn recover(&self) {
        self.state.is_degraded.store(false, Ordering::Relaxed);
    }

    /// How many calls it has answered with success.
    pub(super) fn answered(&self) -> u64 {
        self.state.answered.load(Ordering::Relaxed)
    }
}

impl Drop for Downstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    while let Ok((stream, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        let answer = service_fn(move |call: Request<Incoming>| {
            let state = Arc::clone(&state);
            async move {
                let _ = call.into_body().collect().await;
                let is_degraded = state.is_degraded.load(Ordering::Relaxed);
                sleep(if is_degraded { SLOW } else { FAST }).await;
                let mut response = Response::new(Full::<Bytes>::from("{}"));
                if is_degraded && state.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(FAILURES) {
                    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                } else {
                    state.answered.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<_, Infallible>(response)
            }
        });
        let connection = hyper::server::conn::http1::Builder::new();
        tokio::spawn(connection.serve_connection(TokioIo::new(stream), answer));
    }
}
