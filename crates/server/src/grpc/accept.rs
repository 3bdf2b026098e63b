//! Connections of proxies, up to a number.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// The pause after the system could give no connection (no file descriptors left, say).
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);

/// Connections as they come; further ones than `max` wait until one of those there are has ended.
pub(super) fn connections(listener: TcpListener, max: usize) -> impl Stream<Item = io::Result<Bounded>> {
    let permits = Arc::new(Semaphore::new(max));
    futures_util::stream::unfold((listener, permits), |(listener, permits)| async move {
        let permit = Arc::clone(&permits).acquire_owned().await.ok()?;
        loop {
            match listener.accept().await {
                Ok((stream, _peer)) => {
                    let _ = stream.set_nodelay(true);
                    return Some((Ok(Bounded { stream, _permit: permit }), (listener, permits)));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a gRPC connection");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    })
}

/// A connection that has its place among those that may be open.
pub(super) struct Bounded {
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Bounded {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
