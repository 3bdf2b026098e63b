//! Connections under TLS: the handshake, and the protocol that it chooses.
//!
//! A handshake runs in the task of its connection, which holds one of the permits of connections, and has the time that the
//! head of a request has. A caller who sends a request without TLS is told so in plain text.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use super::lingering_close::linger;
use super::serve::{Accepted, Acceptor, RESERVE_READ_TIMEOUT, limit_in_reserve, refuse};
use crate::peer::Peer;
use crate::peer::transport::Transport;
use crate::tls::{Protocols, Tls, is_http2};

/// The first byte of a TLS handshake.
const HANDSHAKE: u8 = 22;

/// What a caller speaks.
enum Greeted {
    Http1(Peer),
    Http2(Peer, OwnedSemaphorePermit),
    /// It is not TLS.
    Plain(Peer),
}

impl Acceptor {
    /// Serves a connection to a listener with TLS.
    pub(super) async fn serve_encrypted(self: Arc<Self>, tls: Tls, accepted: Accepted) {
        let address = accepted.address;
        let in_reserve = accepted.permit.is_in_reserve();
        let limit = if in_reserve { self.read_timeout.min(RESERVE_READ_TIMEOUT) } else { self.read_timeout };
        let greeted = tokio::select! {
            biased;
            () = self.shutdown.closing().cancelled() => return,
            greeted = tokio::time::timeout(limit, self.greet(&tls, accepted)) => greeted,
        };
        match greeted {
            Ok(Ok(Some(Greeted::Http1(peer)))) => self.serve_connection(peer).await,
            Ok(Ok(Some(Greeted::Http2(peer, _permit)))) => {
                let served = limit_in_reserve(&peer, Arc::clone(&self).serve_http2(peer.clone())).await;
                if served.is_none() {
                    tracing::debug!(peer = %address, "an HTTP/2 connection of the reserve timed out");
                }
            }
            Ok(Ok(Some(Greeted::Plain(peer)))) => {
                let refusal = ApiError::invalid("This port takes requests over TLS alone: use https://");
                if refuse(&peer, refusal).await.is_ok() {
                    linger(&peer, &self.shutdown).await;
                }
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::debug!(peer = %address, %error, "a TLS handshake failed"),
            Err(_elapsed) => tracing::debug!(peer = %address, "a TLS handshake took too long"),
        }
    }

    /// Returns `None` if the caller has left without a word.
    async fn greet(&self, tls: &Tls, accepted: Accepted) -> std::io::Result<Option<Greeted>> {
        let Accepted { tcp, address, permit, open } = accepted;
        let peer = |transport| Peer::new(transport, address, permit, self.budget.clone(), Some(open));
        let Some(first) = tcp.peek().await? else { return Ok(None) };
        if first != HANDSHAKE {
            return Ok(Some(Greeted::Plain(peer(Transport::Plain(tcp)))));
        }
        // Connections beyond the maximum of HTTP/2 are offered HTTP/1.1 alone.
        let http2 = Arc::clone(&self.http2_permits).try_acquire_owned().ok();
        let protocols = if http2.is_some() { Protocols::Http } else { Protocols::Http1 };
        let stream = tls.acceptor(protocols).accept(tcp).await?;
        let is_http2 = is_http2(&stream);
        let peer = peer(Transport::tls(stream));
        Ok(Some(match http2.filter(|_| is_http2) {
            Some(permit) => Greeted::Http2(peer, permit),
            None => Greeted::Http1(peer),
        }))
    }
}
