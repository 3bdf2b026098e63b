//! Purges of what is too old: how much is deleted, and when. What is too old, and how to delete it without delaying other work, the
//! stores know.

use std::time::Duration;

use weir_store::{Error, Result};

/// The pause before the first purge.
const PAUSE_AT_START: Duration = Duration::from_secs(1);

/// How much is deleted, and when: the more there is, the faster. The store makes sure that other work is not delayed.
#[derive(Debug, PartialEq, Eq)]
struct PurgePace {
    /// Rows of a kind with the next call.
    rows: usize,
    /// The pause before it.
    pause: Duration,
}

impl PurgePace {
    const ROWS_MIN: usize = 500;
    const ROWS_MAX: usize = 4_000;
    /// The pause while there is little to purge, and while there is nothing.
    const PAUSE: Duration = Duration::from_secs(5);
    const PAUSE_WHEN_CLEAN: Duration = Duration::from_secs(60);

    const START: Self = Self { rows: Self::ROWS_MIN, pause: PAUSE_AT_START };

    /// The pace after a call that purged so many rows.
    fn after(&self, purged: u64) -> Self {
        match usize::try_from(purged).unwrap_or(usize::MAX) {
            0 => Self { rows: Self::ROWS_MIN, pause: Self::PAUSE_WHEN_CLEAN },
            purged if purged < self.rows => Self { rows: Self::ROWS_MIN, pause: Self::PAUSE },
            // There may be more.
            _ => Self { rows: (self.rows * 2).min(Self::ROWS_MAX), pause: Duration::ZERO },
        }
    }
}

/// Tells the first of several failures in a row from the others.
#[derive(Default)]
pub(crate) struct FailureStreak {
    has_failed: bool,
}

impl FailureStreak {
    pub(crate) fn first_error<'a, T>(&mut self, outcome: &'a Result<T>) -> Option<&'a Error> {
        let had_failed = std::mem::replace(&mut self.has_failed, outcome.is_err());
        outcome.as_ref().err().filter(|_| !had_failed)
    }
}

/// Purges until it is dropped. `purge` deletes up to a number of rows and returns how many they were; `on_failure` hears of the
/// first of several failures in a row. Nothing stays for long after `keep`. What a call that is dropped has deleted stays deleted.
pub(crate) async fn run<F: Future<Output = Result<u64>>>(
    keep: Duration,
    purge: impl Fn(usize) -> F,
    on_purged: impl Fn(u64),
    on_failure: impl Fn(&Error),
) {
    let (mut pace, mut streak) = (PurgePace::START, FailureStreak::default());
    loop {
        tokio::time::sleep(pace.pause.min(keep)).await;
        let outcome = purge(pace.rows).await;
        if let Some(error) = streak.first_error(&outcome) {
            on_failure(error);
        }
        pace = match outcome {
            Ok(purged) => {
                if purged > 0 {
                    on_purged(purged);
                }
                pace.after(purged)
            }
            Err(_) => PurgePace { pause: PurgePace::PAUSE, ..pace },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_there_is_to_purge_the_faster_it_goes() {
        let mut pace = PurgePace::START;
        let mut purged = 0;
        // Whatever is asked for is there: no pause, and more each time.
        for _ in 0..100 {
            purged += pace.rows;
            pace = pace.after(pace.rows as u64);
            assert_eq!(pace.pause, Duration::ZERO);
        }
        assert_eq!(pace.rows, PurgePace::ROWS_MAX);
        assert!(purged > 95 * PurgePace::ROWS_MAX);
    }

    #[test]
    fn the_less_there_is_to_purge_the_longer_it_waits() {
        let busy = PurgePace { rows: PurgePace::ROWS_MAX, pause: Duration::ZERO };
        let slower = busy.after(PurgePace::ROWS_MAX as u64 - 1);
        assert_eq!((slower.rows, slower.pause), (PurgePace::ROWS_MIN, PurgePace::PAUSE));
        assert_eq!(slower.after(0).pause, PurgePace::PAUSE_WHEN_CLEAN);
        assert_eq!(slower.after(0).after(PurgePace::ROWS_MIN as u64).pause, Duration::ZERO);
    }
}
