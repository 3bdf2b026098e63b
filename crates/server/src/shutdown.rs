//! The phases of a stop. Each is a token that the parts of the server wait for.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// The phases of a stop. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    closing: CancellationToken,
    giving_up: CancellationToken,
    disconnecting: CancellationToken,
}

impl Shutdown {
    /// Starts a stop that may take `timeout` in all. Returns when its last phase has begun.
    pub async fn run(&self, timeout: Duration) {
        self.closing.cancel();
        tokio::time::sleep(timeout * 3 / 4).await;
        self.giving_up.cancel();
        // Waiting callers get an answer that the server stops, so connections end by themselves.
        tokio::time::sleep(timeout / 16).await;
        self.disconnecting.cancel();
    }

    /// The stop has begun: no new work is accepted, long polls and event streams end, and the rest may finish.
    #[must_use]
    pub const fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Three quarters of the time are over: whatever still waits is answered as it is, or refused.
    #[must_use]
    pub const fn giving_up(&self) -> &CancellationToken {
        &self.giving_up
    }

    /// Shortly after that: connections are closed, whatever they carry.
    #[must_use]
    pub const fn disconnecting(&self) -> &CancellationToken {
        &self.disconnecting
    }
}
