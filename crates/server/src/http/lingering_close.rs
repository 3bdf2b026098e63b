//! Closes a connection whose caller is still sending: after the response, incoming bytes are read and discarded for a while.
//!
//! The operating system answers unread bytes with a reset, and a caller that gets a reset discards the response and reports a
//! broken connection. A caller whose large body was refused by its head would never see why.

use std::future::poll_fn;
use std::time::Duration;

use crate::peer::Peer;
use crate::shutdown::Shutdown;

const BYTES_MAX: usize = 64 << 20;
const TIME_MAX: Duration = Duration::from_secs(30);
/// A caller that sends nothing for this long has read its response, or never will.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Shorter in the reserve, which has few permits.
const TIME_MAX_IN_RESERVE: Duration = Duration::from_secs(1);

/// Discards what the peer still sends, until it closes, falls silent or has sent too much. The response has been written and
/// this side of the connection is closed.
pub(crate) async fn linger(peer: &Peer, shutdown: &Shutdown) {
    let time_max = if peer.is_in_reserve() { TIME_MAX_IN_RESERVE } else { TIME_MAX };
    tokio::select! {
        biased;
        () = shutdown.disconnecting().cancelled() => {}
        _ = tokio::time::timeout(time_max, discard(peer)) => {}
    }
}

async fn discard(peer: &Peer) {
    let mut total = 0;
    while total < BYTES_MAX {
        match tokio::time::timeout(SILENCE_MAX, poll_fn(|context| peer.poll_discard(context))).await {
            Ok(read @ 1..) => total += read,
            Ok(0) | Err(_) => return,
        }
    }
}
