//! The empty handler: the highest rate an axum server reaches on this machine, to which other rates are compared.
//!
//! It runs as its own process through the hidden `weir bench empty`, on the same runtime as the real server.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::routing::post;
use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::report::print_line;

/// Arguments of the hidden `weir bench empty`.
#[derive(Debug, clap::Args)]
pub struct EmptyArgs {
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
}

/// Serves `POST /api/send`, and `POST /api/v1/ai/chat` as an upstream, with an empty handler until SIGTERM, after printing where it listens.
pub async fn serve_empty(listen: SocketAddr) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let listener = TcpListener::bind(listen).await.with_context(|| format!("listen on {listen}"))?;
    let address = listener.local_addr().context("read the listening address")?;
    print_line(&format!("weir ready empty http://{address}"))?;
    tokio::select! {
        served = serve(listener) => served,
        _ = terminate.recv() => Ok(()),
    }
}

async fn serve(listener: TcpListener) -> Result<()> {
    let router = Router::new()
        .route("/api/send", post(|| async { "ok" }))
        .route("/api/v1/ai/chat", post(|| async { "ok" }));
    // A socket without the option works as well, only slower.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    axum::serve(listener, router).await.context("serve the empty handler")
}
