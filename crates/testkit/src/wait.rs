//! The one place where tests wait: for a condition, with a deadline, never for a fixed time.

use std::time::{Duration, Instant};

const POLL_EVERY: Duration = Duration::from_millis(10);

/// Polls `condition` until it holds; panics naming `what` when it does not within `deadline`.
///
/// A condition that hangs counts as one that does not hold, so the deadline is kept in any case.
pub async fn until(what: &str, deadline: Duration, condition: impl AsyncFnMut() -> bool) {
    assert!(comes_true(deadline, condition).await, "waited {deadline:?} in vain for: {what}");
}

/// [`until`] for those with more to say than a name: returns whether the condition came to hold.
pub(crate) async fn comes_true(deadline: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let poll = async {
        while !condition().await {
            tokio::time::sleep(POLL_EVERY).await;
        }
    };
    tokio::time::timeout(deadline, poll).await.is_ok()
}

/// [`comes_true`] for code without a runtime.
pub(crate) fn holds_within(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
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
