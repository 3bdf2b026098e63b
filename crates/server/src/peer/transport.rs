//! What a caller's bytes travel on: a TCP connection, plain or under TLS, or one request of an HTTP/2 connection, which has no
//! bytes of its own.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;

/// How long a peer may read nothing of what is written to it.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// A TCP connection. Writing fails once the peer has read nothing for a minute.
pub(crate) struct Tcp {
    stream: TcpStream,
    /// The write timeout, while the peer reads nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// A connection under TLS.
pub(crate) struct Encrypted {
    stream: TlsStream<Tcp>,
    /// A byte that was read to see whether the peer is still connected.
    peeked: Option<u8>,
}

pub(crate) enum Transport {
    Plain(Tcp),
    Tls(Box<Encrypted>),
    /// A request of an HTTP/2 connection. The other end of the channel is dropped when the peer has cancelled the request or
    /// has its response; `None` from then on.
    Http2(Option<oneshot::Receiver<Infallible>>),
}

impl Tcp {
    pub(crate) fn new(stream: TcpStream) -> Self {
        // Responses are written whole; waiting to fill a packet only delays them.
        let _ = stream.set_nodelay(true);
        Self { stream, stalled: None }
    }

    /// Returns the first byte that the peer sends, and leaves it to be read; `None` if there is none.
    pub(crate) async fn peek(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        Ok((self.stream.peek(&mut byte).await? > 0).then_some(byte[0]))
    }

    /// Fails a write that has been pending for too long.
    fn limit<T>(
        stalled: &mut Option<Pin<Box<Sleep>>>,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            *stalled = None;
            return written;
        }
        let timer = stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Tcp {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        Self::limit(&mut this.stalled, context, written)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

impl Encrypted {
    fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(byte) = self.peeked.take()
        {
            buffer.put_slice(&[byte]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }

    /// Ready at the end of the connection. Under TLS it is only found by reading, so one byte is kept for the next reader.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.peeked.is_some() {
            return Poll::Pending;
        }
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
            Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                self.peeked = Some(byte[0]);
                Poll::Pending
            }
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Transport {
    pub(crate) fn tls(stream: TlsStream<Tcp>) -> Self {
        Self::Tls(Box::new(Encrypted { stream, peeked: None }))
    }

    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// Ready when the peer has closed its side or the connection is lost. Later bytes are left unread; while there are any,
    /// the end is not noticed.
    pub(crate) fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Plain(tcp) => {
                let mut byte = [std::mem::MaybeUninit::uninit()];
                match tcp.stream.poll_peek(context, &mut ReadBuf::uninit(&mut byte)) {
                    Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(()),
                    Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
                }
            }
            Self::Tls(encrypted) => encrypted.poll_end(context),
            Self::Http2(cancelled) => {
                let Some(receiver) = cancelled else { return Poll::Ready(()) };
                let ended = Pin::new(receiver).poll(context).map(drop);
                if ended.is_ready() {
                    *cancelled = None;
                }
                ended
            }
        }
    }

    #[cfg(test)]
    pub(crate) const fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(tcp) => Some(&tcp.stream),
            Self::Tls(_) | Self::Http2(_) => None,
        }
    }
}

/// Nobody reads from or writes to a single request of an HTTP/2 connection.
fn no_bytes<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
}

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(context, buffer),
            Self::Tls(encrypted) => encrypted.poll_read(context, buffer),
            Self::Http2(_) => no_bytes(),
        }
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(context, bytes),
            Self::Tls(encrypted) => Pin::new(&mut encrypted.stream).poll_write(context, bytes),
            Self::Http2(_) => no_bytes(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(context),
            Self::Tls(encrypted) => Pin::new(&mut encrypted.stream).poll_flush(context),
            Self::Http2(_) => no_bytes(),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(context),
            Self::Tls(encrypted) => Pin::new(&mut encrypted.stream).poll_shutdown(context),
            Self::Http2(_) => no_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;

    use futures_util::FutureExt;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::client::TlsStream as ClientStream;
    use tokio_rustls::{TlsAcceptor, TlsConnector};
    use weir_testkit::certificates::Authority;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    async fn connect() -> (ClientStream<TcpStream>, Transport) {
        let authority = Authority::generate();
        let issued = authority.issue(&["localhost"]);
        let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let server = server.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let acceptor = TlsAcceptor::from(Arc::new(server.with_single_cert(chain, key).unwrap()));
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        let client = ClientConfig::builder_with_provider(provider);
        let client = client.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let connector = TlsConnector::from(Arc::new(client.with_no_client_auth()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let (client, server) =
            tokio::join!(connector.connect(name, stream), acceptor.accept(Tcp::new(accepted)));
        (client.unwrap(), Transport::tls(server.unwrap()))
    }

    #[tokio::test]
    async fn the_end_of_an_encrypted_connection_is_noticed_and_no_byte_is_lost() {
        let (mut client, mut server) = connect().await;
        assert!(poll_fn(|context| server.poll_end(context)).now_or_never().is_none());
        client.write_all(b"request").await.unwrap();
        client.flush().await.unwrap();
        // Polled until the first byte is there.
        poll_fn(|context| {
            assert!(server.poll_end(context).is_pending());
            let Transport::Tls(encrypted) = &server else { panic!("it is encrypted") };
            if encrypted.peeked.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let mut received = [0; 7];
        tokio::time::timeout(TEST_TIMEOUT, server.read_exact(&mut received)).await.unwrap().unwrap();
        assert_eq!(&received, b"request");
        client.shutdown().await.unwrap();
        let end = poll_fn(|context| server.poll_end(context));
        tokio::time::timeout(TEST_TIMEOUT, end).await.expect("it is noticed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_of_an_encrypted_response_is_dropped() {
        let (client, mut server) = connect().await;
        // The connection, the system and TLS buffer some of it.
        let writing = async {
            server.write_all(&vec![b'x'; 64 << 20]).await?;
            server.flush().await
        };
        let written = tokio::time::timeout(Duration::from_secs(3_600), writing).await.expect("it ends");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(client);
    }
}
