//! A request body that reports to its connection how many bytes of it were read, and whether all of them were. Bytes beyond
//! its end belong to the next head (`peer.rs`). If the body was not read to its end, the connection is closed in a way that
//! lets the caller read its response (`lingering_close.rs`).

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::peer::Peer;

pub(crate) struct TrackedBody {
    body: Incoming,
    is_chunked: bool,
    /// `None` without a body, or once it is complete.
    peer: Option<Peer>,
}

impl TrackedBody {
    pub(crate) fn new(body: Incoming, peer: &Peer) -> Self {
        let peer = (!body.is_end_stream()).then(|| peer.clone());
        Self { is_chunked: body.size_hint().exact().is_none(), body, peer }
    }

    /// The bytes on the wire of a frame of the body. A chunk adds its size in hex and two line breaks. hyper may split a chunk
    /// into several frames, so the result may be a few bytes too large.
    fn wire_bytes(&self, data: usize) -> usize {
        match data.checked_ilog2() {
            Some(log) if self.is_chunked => data + log as usize / 4 + 1 + "\r\n\r\n".len(),
            _ => data,
        }
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(peer) = &self.peer {
            if let Some(Ok(frame)) = &frame {
                peer.record_body_read(self.wire_bytes(frame.data_ref().map_or(0, Bytes::len)));
            }
            // Readers may keep a body after its last frame.
            if frame.is_none() || self.body.is_end_stream() {
                peer.end_body(false);
                self.peer = None;
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        if let Some(peer) = &self.peer {
            peer.end_body(!self.body.is_end_stream());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use http::{Request, Response};
    use http_body_util::{BodyExt, Empty};
    use hyper::server::conn::http1::Builder;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;
    use crate::buffer_budget::BufferBudget;
    use crate::peer::fixtures::{connect, ordinary_permit};

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);
    const FREE: usize = 8 * 1024;

    /// Has hyper read a request whose body is followed by the beginning of a head. Returns the bytes charged once the request
    /// is answered.
    async fn charged_after(framing: &'static str, body: Vec<u8>, head: usize) -> usize {
        let budget = BufferBudget::new(1 << 20);
        let (mut client, peer) = connect(ordinary_permit(), budget.clone()).await;
        let (started, mut requests) = mpsc::channel(1);
        let stream = TokioIo::new(peer.stream());
        let server = tokio::spawn(async move {
            let service = service_fn(async |request: Request<Incoming>| {
                peer.begin_request(true, || 0);
                started.send(()).await.unwrap();
                let whole = TrackedBody::new(request.into_body(), &peer).collect().await;
                assert!(whole.is_ok());
                Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
            });
            Builder::new().half_close(true).serve_connection(stream, service).await
        });
        client.write_all(format!("POST / HTTP/1.1\r\n{framing}\r\n\r\n").as_bytes()).await.unwrap();
        tokio::time::timeout(TEST_TIMEOUT, requests.recv()).await.expect("a request");
        client.write_all(&[body, vec![b'h'; head]].concat()).await.unwrap();
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n\r\n") {
            assert!(client.read_buf(&mut response).await.unwrap() > 0);
        }
        // The whole head has arrived before the response was written, or is read now.
        let mut rest = Box::pin(tokio::time::timeout(TEST_TIMEOUT, async {
            while budget.used() + FREE < head {
                tokio::task::yield_now().await;
            }
        }));
        rest.as_mut().await.expect("it is charged");
        server.abort();
        budget.used()
    }

    #[tokio::test]
    async fn bytes_after_a_body_in_the_same_read_are_charged_as_a_head() {
        let head = 30_000;
        let plain = charged_after("content-length: 100000", vec![b'b'; 100_000], head).await;
        assert_eq!(plain, head - FREE);
        let chunks = b"3e8\r\n".iter().copied().chain([b'b'; 1_000]).chain(*b"\r\n");
        let chunks: Vec<u8> = chunks.collect::<Vec<u8>>().repeat(1_000);
        let chunked = [chunks, b"0\r\n\r\n".to_vec()].concat();
        let charged = charged_after("transfer-encoding: chunked", chunked, head).await;
        assert!((head - FREE..head - FREE + 1_000).contains(&charged), "{charged}");
    }
}
