//! Accepts gRPC connections up to a maximum, plain or under TLS, and drops those that do not begin to speak HTTP/2, and those
//! whose callers do not take their responses. A TLS handshake runs in the task of its connection, when that first reads or writes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tokio_rustls::Accept;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::requests::GrpcCaller;
use crate::peer::transport::Tcp;
use crate::tls::{Protocols, Tls};

/// The pause after `accept` failed, for example because no file descriptors are left.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);

/// How long a connection may take to send the preface of HTTP/2, after the handshake of TLS. Afterwards pings show whether the peer is still connected.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
const PREFACE_BYTES: usize = 24;

/// Accepts connections. Beyond `max`, a connection waits until another one has ended.
pub(super) fn connections(
    listener: TcpListener,
    tls: Option<Tls>,
    max: usize,
) -> impl Stream<Item = io::Result<GrpcConnection>> {
    let permits = Arc::new(Semaphore::new(max));
    futures_util::stream::unfold((listener, tls, permits), |(listener, tls, permits)| async move {
        let permit = Arc::clone(&permits).acquire_owned().await.ok()?;
        loop {
            match listener.accept().await {
                Ok((stream, _peer)) => {
                    let connection = GrpcConnection::new(Tcp::new(stream), tls.as_ref(), permit);
                    return Some((Ok(connection), (listener, tls, permits)));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a gRPC connection; trying again");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    })
}

pub(super) struct GrpcConnection {
    transport: GrpcTransport,
    caller: GrpcCaller,
    _permit: OwnedSemaphorePermit,
    /// The bytes of the preface that have not arrived yet.
    preface: usize,
    /// `None` once the preface has arrived.
    preface_timer: Option<Pin<Box<Sleep>>>,
}

enum GrpcTransport {
    Plain(Tcp),
    Handshake(Box<Accept<Tcp>>),
    Tls(Box<TlsStream<Tcp>>),
}

impl GrpcConnection {
    fn new(stream: Tcp, tls: Option<&Tls>, permit: OwnedSemaphorePermit) -> Self {
        let preface_timer = Some(Box::pin(tokio::time::sleep(PREFACE_TIMEOUT)));
        let transport = match tls {
            Some(tls) => GrpcTransport::Handshake(Box::new(tls.acceptor(Protocols::Grpc).accept(stream))),
            None => GrpcTransport::Plain(stream),
        };
        Self {
            transport,
            caller: GrpcCaller::default(),
            _permit: permit,
            preface: PREFACE_BYTES,
            preface_timer,
        }
    }

    /// Returns what to read from and write to, once the handshake is complete.
    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut dyn ReadWrite>>> {
        if let GrpcTransport::Handshake(handshake) = &mut self.transport {
            match Pin::new(handshake.as_mut()).poll(context) {
                Poll::Ready(Ok(stream)) => self.transport = GrpcTransport::Tls(Box::new(stream)),
                Poll::Ready(Err(error)) => {
                    tracing::debug!(%error, "a TLS handshake on gRPC failed");
                    return Poll::Ready(Err(error));
                }
                Poll::Pending => ready!(self.poll_preface_timer(context))?,
            }
        }
        Poll::Ready(Ok(match &mut self.transport {
            GrpcTransport::Plain(stream) => Pin::new(stream),
            GrpcTransport::Tls(stream) => Pin::new(stream.as_mut()),
            GrpcTransport::Handshake(_) => return Poll::Pending,
        }))
    }

    /// Ready, with an error, when the preface has not arrived in time.
    fn poll_preface_timer(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.preface_timer {
            Some(timer) => timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into())),
            None => Poll::Pending,
        }
    }
}

trait ReadWrite: AsyncRead + AsyncWrite + Unpin {}

impl<S: AsyncRead + AsyncWrite + Unpin> ReadWrite for S {}

impl Connected for GrpcConnection {
    type ConnectInfo = GrpcCaller;

    fn connect_info(&self) -> GrpcCaller {
        self.caller.clone()
    }
}

impl AsyncRead for GrpcConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.caller.unread.is_overdue() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let read = ready!(self.poll_stream(context))?.poll_read(context, buffer);
        if self.preface_timer.is_none() {
            return read;
        }
        if read.is_pending() {
            return self.poll_preface_timer(context);
        }
        self.preface = self.preface.saturating_sub(buffer.filled().len() - before);
        if self.preface == 0 {
            self.preface_timer = None;
        }
        read
    }
}

impl AsyncWrite for GrpcConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_stream(context))?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(context))?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(context))?.poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use bytes::Bytes;
    use futures_util::{FutureExt, StreamExt};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::peer::transport::WRITE_TIMEOUT;

    #[tokio::test(start_paused = true)]
    async fn connections_beyond_the_bound_wait_and_silent_ones_are_dropped() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepted = pin!(connections(listener, None, 1));
        let mut first = TcpStream::connect(address).await.unwrap();
        let _second = TcpStream::connect(address).await.unwrap();
        let mut connection = accepted.next().await.unwrap().unwrap();
        assert!(accepted.next().now_or_never().is_none(), "the maximum is 1");
        first.write_all(&[0; PREFACE_BYTES - 1]).await.unwrap();
        let mut preface = Vec::new();
        let reading = tokio::time::timeout(2 * PREFACE_TIMEOUT, connection.read_to_end(&mut preface));
        let error = reading.await.expect("the read times out").unwrap_err();
        assert_eq!((error.kind(), preface.len()), (io::ErrorKind::TimedOut, PREFACE_BYTES - 1));
        drop(connection);
        assert!(accepted.next().await.is_some(), "its permit is free");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_speaks_http2_may_be_idle() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepted = pin!(connections(listener, None, 1));
        let mut client = TcpStream::connect(address).await.unwrap();
        let mut connection = accepted.next().await.unwrap().unwrap();
        client.write_all(&[0; PREFACE_BYTES]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
        let idle = tokio::time::timeout(10 * PREFACE_TIMEOUT, connection.read_u8()).await;
        assert!(idle.is_err(), "it is not ended: {idle:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_responses_are_not_taken_is_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepted = pin!(connections(listener, None, 1));
        let mut client = TcpStream::connect(address).await.unwrap();
        let mut connection = accepted.next().await.unwrap().unwrap();
        client.write_all(&[0; PREFACE_BYTES]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
        let message = connection.connect_info().unread.track(Bytes::from_static(b"message"), None);
        tokio::time::advance(WRITE_TIMEOUT).await;
        let read = connection.read_u8().now_or_never().expect("it does not wait");
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(message);
        assert!(connection.read_u8().now_or_never().is_none(), "it goes on when all is taken");
    }
}
