//! The steps of a stop: nothing new is begun, what waits is told to end, and connections that are still open are cut.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// The steps of a stop. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    closing: CancellationToken,
    ending: CancellationToken,
    cutting: CancellationToken,
}

impl Shutdown {
    /// Begins a stop that may take `timeout` in all, and returns when its last step is taken.
    pub async fn run(&self, timeout: Duration) {
        self.closing.cancel();
        tokio::time::sleep(timeout * 3 / 4).await;
        self.ending.cancel();
        // Those who wait are answered that the server stops; then there is nothing left to wait for.
        tokio::time::sleep(timeout / 16).await;
        self.cutting.cancel();
    }

    /// The stop has begun: no new work is taken, long polls and event streams end, and the rest may finish.
    #[must_use]
    pub const fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Three quarters of the time are over: what still waits is answered as it is, or refused.
    #[must_use]
    pub const fn ending(&self) -> &CancellationToken {
        &self.ending
    }

    /// Shortly after that: connections are closed, whatever they carry.
    #[must_use]
    pub const fn cutting(&self) -> &CancellationToken {
        &self.cutting
    }
}
