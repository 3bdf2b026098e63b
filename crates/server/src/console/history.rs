//! The last 15 minutes by the second and the last day by the minute, of a fixed number of series: pure, and of a fixed size.
//!
//! Seconds are counted on a clock that only goes forward. What a second brought is added up in its minute; of levels, such as a
//! latency or a queue's length, a minute has the highest.

use std::collections::VecDeque;

/// How many seconds are kept.
pub(crate) const SECONDS_MAX: usize = 15 * 60;
/// How many minutes are kept.
pub(crate) const MINUTES_MAX: usize = 24 * 60;
const SECONDS_PER_MINUTE: u64 = 60;

/// What happened in one second or minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample<const COUNTS: usize, const LEVELS: usize> {
    /// How often things happened.
    pub(crate) counts: [u32; COUNTS],
    /// The highest that things were.
    pub(crate) levels: [u32; LEVELS],
}

impl<const COUNTS: usize, const LEVELS: usize> Default for Sample<COUNTS, LEVELS> {
    fn default() -> Self {
        Self { counts: [0; COUNTS], levels: [0; LEVELS] }
    }
}

impl<const COUNTS: usize, const LEVELS: usize> Sample<COUNTS, LEVELS> {
    fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
        for (level, other) in self.levels.iter_mut().zip(other.levels) {
            *level = (*level).max(other);
        }
    }
}

/// Samples of consecutive steps of time, the oldest first. Steps in which nothing was sampled are missing.
#[derive(Clone, Debug)]
pub(crate) struct Ring<const COUNTS: usize, const LEVELS: usize> {
    steps_max: usize,
    samples: VecDeque<(u64, Sample<COUNTS, LEVELS>)>,
}

impl<const COUNTS: usize, const LEVELS: usize> Ring<COUNTS, LEVELS> {
    fn new(steps_max: usize) -> Self {
        Self { steps_max, samples: VecDeque::with_capacity(steps_max) }
    }

    /// Adds to a step. One that is not after the last step is added to that.
    fn add(&mut self, step: u64, sample: &Sample<COUNTS, LEVELS>) {
        match self.samples.back_mut() {
            Some((last, present)) if step <= *last => present.merge(sample),
            _ => {
                let kept = u64::try_from(self.steps_max).unwrap_or(u64::MAX);
                // First, since the ring has room for no more.
                while self.samples.front().is_some_and(|(first, _)| step - first >= kept) {
                    self.samples.pop_front();
                }
                self.samples.push_back((step, *sample));
            }
        }
    }

    pub(crate) fn samples(&self) -> impl Iterator<Item = &(u64, Sample<COUNTS, LEVELS>)> {
        self.samples.iter()
    }
}

/// The two rings.
#[derive(Clone, Debug)]
pub(crate) struct History<const COUNTS: usize, const LEVELS: usize> {
    pub(crate) seconds: Ring<COUNTS, LEVELS>,
    pub(crate) minutes: Ring<COUNTS, LEVELS>,
}

impl<const COUNTS: usize, const LEVELS: usize> Default for History<COUNTS, LEVELS> {
    fn default() -> Self {
        Self { seconds: Ring::new(SECONDS_MAX), minutes: Ring::new(MINUTES_MAX) }
    }
}

impl<const COUNTS: usize, const LEVELS: usize> History<COUNTS, LEVELS> {
    /// Adds what a second brought. Its minute has it at once.
    pub(crate) fn add(&mut self, second: u64, sample: &Sample<COUNTS, LEVELS>) {
        self.seconds.add(second, sample);
        self.minutes.add(second / SECONDS_PER_MINUTE, sample);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type TestSample = Sample<2, 1>;

    fn sample(count: u32, level: u32) -> TestSample {
        Sample { counts: [count, 1], levels: [level] }
    }

    /// What a map of all steps has of the last ones.
    fn model(added: &[(u64, TestSample)], width: u64, kept: usize) -> Vec<(u64, TestSample)> {
        let mut steps: BTreeMap<u64, TestSample> = BTreeMap::new();
        for (second, sample) in added {
            let step = second / width;
            let newest = steps.keys().next_back().copied().unwrap_or(0);
            steps.entry(step.max(newest)).or_default().merge(sample);
        }
        let newest = steps.keys().next_back().copied().unwrap_or(0);
        steps.into_iter().filter(|(step, _)| newest - step < kept as u64).collect()
    }

    fn content(ring: &Ring<2, 1>) -> Vec<(u64, TestSample)> {
        ring.samples().copied().collect()
    }

    proptest! {
        /// Steps of a second, gaps of minutes and of more than a day, and clocks that stand still.
        #[test]
        fn both_rings_have_what_a_map_of_everything_has_of_their_time(
            steps in proptest::collection::vec(
                (prop_oneof![6 => Just(1_u64), 1 => Just(0), 2 => 2_u64..200, 1 => 200_u64..100_000], 0_u32..9, 0_u32..9),
                1..300,
            ),
        ) {
            let (mut history, mut added, mut second) = (History::<2, 1>::default(), Vec::new(), 0);
            for (step, count, level) in steps {
                second += step;
                let sample = sample(count, level);
                history.add(second, &sample);
                added.push((second, sample));
            }
            prop_assert_eq!(content(&history.seconds), model(&added, 1, SECONDS_MAX));
            prop_assert_eq!(content(&history.minutes), model(&added, SECONDS_PER_MINUTE, MINUTES_MAX));
        }

        /// Nothing that is counted within the last 15 minutes is lost or counted twice.
        #[test]
        fn the_counts_of_the_minutes_are_those_of_their_seconds(counts in proptest::collection::vec(0_u32..9, 1..900)) {
            let mut history = History::<2, 1>::default();
            for (second, count) in counts.iter().enumerate() {
                history.add(second as u64, &sample(*count, *count));
            }
            let total = |ring: &Ring<2, 1>| ring.samples().map(|(_, sample)| sample.counts[0]).sum::<u32>();
            prop_assert_eq!(total(&history.seconds), counts.iter().sum::<u32>());
            prop_assert_eq!(total(&history.minutes), counts.iter().sum::<u32>());
            let highest = history.minutes.samples().map(|(_, sample)| sample.levels[0]).max();
            prop_assert_eq!(highest, counts.iter().max().copied());
        }
    }

    #[test]
    fn no_more_steps_are_kept_than_the_bound() {
        let mut history = History::<2, 1>::default();
        for second in 0..200_000 {
            history.add(second, &sample(1, 1));
        }
        assert_eq!(
            (history.seconds.samples().count(), history.minutes.samples().count()),
            (SECONDS_MAX, MINUTES_MAX)
        );
        assert!(history.seconds.samples.capacity() < SECONDS_MAX * 2);
    }
}
