//! A request's body as hyper reads it, which tells its connection whether it was read to the end. Where it was not, the
//! connection is closed in a way that lets the caller read its answer (`lingering_close.rs`).

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::peer::Peer;

/// A request's body, on behalf of its connection.
pub(super) struct TrackedBody {
    body: Incoming,
    /// None where there is nothing to track: most requests have no body, or have all of it with their head.
    peer: Option<Peer>,
}

impl TrackedBody {
    pub(super) fn new(body: Incoming, peer: &Peer) -> Self {
        let peer = (!body.is_end_stream()).then(|| peer.clone());
        Self { body, peer }
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
        if frame.is_none()
            && let Some(peer) = self.peer.take()
        {
            peer.end_body(false);
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
