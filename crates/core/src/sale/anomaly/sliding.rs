//! Counts over a window that slides in steps: what was counted in each of the last steps.

use std::time::Duration;

use crate::Timestamp;

/// The steps of a window.
pub(super) const STEPS: usize = 12;
/// The length of a step in seconds.
const STEP_SECONDS: u64 = 5;

/// A step of time. Steps are numbered from the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step(u64);

impl Step {
    pub(super) const EPOCH: Self = Self(0);

    pub(super) fn of(at: Timestamp) -> Self {
        let micros = u64::try_from(at.as_micros()).unwrap_or_default();
        Self(micros.checked_div(STEP_SECONDS.saturating_mul(1_000_000)).unwrap_or_default())
    }

    /// Returns how many steps ago `earlier` was.
    pub(super) const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Whether `earlier` is in the window that ends with this step.
    pub(super) fn can_see(self, earlier: Self) -> bool {
        usize::try_from(self.since(earlier)).is_ok_and(|steps| steps < STEPS)
    }
}

/// Returns how long `steps` steps take.
pub(super) fn length(steps: usize) -> Duration {
    Duration::from_secs(u64::try_from(steps).unwrap_or_default().saturating_mul(STEP_SECONDS))
}

/// A count for each of the last [`STEPS`] steps, the newest first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recent {
    newest: Step,
    counts: [u32; STEPS],
}

impl Recent {
    pub(super) const NONE: Self = Self { newest: Step::EPOCH, counts: [0; STEPS] };

    pub(super) fn add(&mut self, now: Step) {
        self.move_to(now);
        if let Some(count) = self.counts.first_mut() {
            *count = count.saturating_add(1);
        }
    }

    /// Returns the sum of the last `steps` steps.
    pub(super) fn sum(&self, now: Step, steps: usize) -> u64 {
        let mut at_now = *self;
        at_now.move_to(now);
        at_now.counts.iter().take(steps).copied().map(u64::from).sum()
    }

    /// A step before the newest is the newest: a clock that was set back moves nothing.
    fn move_to(&mut self, now: Step) {
        let steps = usize::try_from(now.since(self.newest)).unwrap_or(STEPS).min(STEPS);
        if steps == 0 {
            return;
        }
        self.counts.rotate_right(steps.checked_rem(STEPS).unwrap_or_default());
        self.counts.iter_mut().take(steps).for_each(|count| *count = 0);
        self.newest = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_window_is_not_counted() {
        let mut recent = Recent::NONE;
        for step in [100, 100, 101, 105] {
            recent.add(Step(step));
        }
        let sums = [1, 5, 6, STEPS].map(|steps| recent.sum(Step(105), steps));
        assert_eq!(sums, [1, 2, 4, 4]);
        assert_eq!(recent.sum(Step(111), STEPS), 4);
        assert_eq!(recent.sum(Step(112), STEPS), 2);
        assert_eq!(recent.sum(Step(u64::MAX), STEPS), 0);
        recent.add(Step(90));
        assert_eq!(recent.sum(Step(105), 1), 2, "an earlier step counts as the newest");
    }
}
