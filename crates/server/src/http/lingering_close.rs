//! Closing a connection whose caller is still sending: after the response, what comes is read and discarded for a while.
//!
//! The system answers unread bytes with a reset, and a caller that gets one discards its response and reports a broken
//! connection. So a caller whose large body was refused by its head would never learn why.

use std::future::poll_fn;
use std::time::Duration;

use crate::peer::Peer;
use crate::shutdown::Shutdown;

/// The most that is read, and how long that may take in all.
const BYTES_MAX: usize = 64 << 20;
const TIME_MAX: Duration = Duration::from_secs(30);
/// A caller that sends nothing for so long has read its response, or never will.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// In the reserve, where places are few.
const TIME_MAX_IN_RESERVE: Duration = Duration::from_secs(1);

/// Reads what the peer still sends until it ends, falls silent or has sent too much. The response has been written and this
/// side of the connection closed.
pub(crate) async fn linger(peer: &Peer, shutdown: &Shutdown) {
    let time_max = if peer.is_in_reserve() { TIME_MAX_IN_RESERVE } else { TIME_MAX };
    tokio::select! {
        biased;
        () = shutdown.cutting().cancelled() => {}
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
