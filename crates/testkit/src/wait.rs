//! How tests wait: for a condition with a deadline, never for a fixed time.

use std::time::{Duration, Instant};

const POLL_EVERY: Duration = Duration::from_millis(10);

/// Polls `condition` until it holds; panics with `what` if it does not within `deadline`.
///
/// A condition that hangs counts as false, so the deadline holds in any case.
pub async fn until(what: &str, deadline: Duration, condition: impl AsyncFnMut() -> bool) {
    assert!(becomes_true(deadline, condition).await, "waited {deadline:?} in vain for: {what}");
}

/// Like [`until`], but returns whether the condition held, for callers with their own message.
pub(crate) async fn becomes_true(deadline: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let poll = async {
        while !condition().await {
            tokio::time::sleep(POLL_EVERY).await;
        }
    };
    tokio::time::timeout(deadline, poll).await.is_ok()
}

/// Like [`becomes_true`], for code without a runtime.
pub(crate) fn becomes_true_blocking(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(POLL_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn returns_as_soon_as_the_condition_holds() {
        let mut polls = 0;
        until("three polls", Duration::from_secs(5), async || {
            polls += 1;
            polls == 3
        })
        .await;
        assert_eq!(polls, 3);
    }

    #[tokio::test]
    #[should_panic(expected = "in vain for: the impossible")]
    async fn names_what_it_waited_for() {
        until("the impossible", Duration::from_millis(30), async || false).await;
    }

    #[tokio::test]
    #[should_panic(expected = "in vain for: an answer")]
    async fn a_condition_that_hangs_still_meets_the_deadline() {
        until("an answer", Duration::from_millis(30), std::future::pending::<bool>).await;
    }

    #[tokio::test]
    async fn works_inside_a_spawned_task() {
        let task = tokio::spawn(async {
            until("nothing", Duration::from_secs(5), async || true).await;
        });
        task.await.unwrap();
    }
}
