//! Checks the invariants of the slot rule (no window over its maximum, no event before its time or outside its window,
//! no more than its share in a window that has started) and compares it with a model that counts every event anew.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a model may panic; the test then fails"
)]

use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::slot::{Forecaster, Pace, SlotAssignment, Windows};

const START_MS: i64 = 1_700_000_000_000;

/// All assigned events: requested time, window and time, in microseconds.
#[derive(Default)]
struct Model {
    events: Vec<(i64, i64, i64)>,
}

impl Model {
    fn count(&self, window: i64) -> i64 {
        self.events.iter().filter(|(_, start, _)| *start == window).count() as i64
    }

    /// Returns the window that an event for `requested` must get, by checking window after window.
    fn expected(&self, requested: i64, max: i64, window_us: i64) -> i64 {
        let first = requested.div_euclid(window_us) * window_us;
        let left_ms = (window_us - (requested - first)) / 1_000;
        let capacity_from =
            if left_ms == 0 { 0 } else { max * (window_us - (requested - first)) / window_us };
        if self.count(first) < capacity_from {
            return first;
        }
        (1..).map(|n| first + n * window_us).find(|start| self.count(*start) < max).unwrap()
    }
}

fn place(windows: &mut Windows, requested: Timestamp, random: u64) -> SlotAssignment {
    let start = windows.find(requested).unwrap();
    windows.assign(start, requested, random).unwrap()
}

fn history() -> impl Strategy<Value = (u32, u64, Vec<(i64, u64)>)> {
    (1_u32..12, prop_oneof![1_u64..20, Just(1_000), Just(4_000)]).prop_flat_map(|(max, window_ms)| {
        let window_us = window_ms.cast_signed() * 1_000;
        // Few distinct times, so that windows fill up; some of them between milliseconds.
        let requested = prop_oneof![
            3 => Just(0_i64),
            2 => 0..window_us * 3,
            1 => (0..5_i64).prop_map(move |n| n * window_us + window_us / 2),
            1 => -window_us * 2..0,
        ];
        (Just(max), Just(window_ms), prop::collection::vec((requested, any::<u64>()), 1..120))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn assignments_match_the_model((max, window_ms, events) in history()) {
        let pace = Pace::new(max, Duration::from_millis(window_ms)).unwrap();
        let window_us = window_ms.cast_signed() * 1_000;
        let base = (START_MS * 1_000).div_euclid(window_us) * window_us;
        let mut windows = Windows::new(pace, 100);
        for n in -3..200 {
            windows.add(Timestamp::from_micros(base + n * window_us), 0);
        }
        let mut model = Model::default();
        for (offset, random) in events {
            let requested = base + offset;
            let expected = model.expected(requested, i64::from(max), window_us);
            let place = place(&mut windows, Timestamp::from_micros(requested), random);
            let (start, scheduled) = (place.window_start.as_micros(), place.scheduled.as_micros());
            prop_assert_eq!(start, expected);
            prop_assert!(scheduled >= requested, "not before its time");
            prop_assert!(start <= scheduled && scheduled < start + window_us, "inside its window");
            prop_assert_eq!(scheduled.rem_euclid(1_000), start.rem_euclid(1_000), "whole milliseconds");
            model.events.push((requested, start, scheduled));
            prop_assert!(model.count(start) <= i64::from(max));
        }
        for (start, count, _) in windows.changed() {
            prop_assert_eq!(i64::from(count), model.count(start.as_micros()), "counters equal events");
        }
    }

    /// The forecast of a load equals its assignment.
    #[test]
    fn a_forecast_is_where_the_load_ends(
        (max, window_ms, before) in history(), into in 0_u64..4_000_000, load in 1_u64..200,
    ) {
        let pace = Pace::new(max, Duration::from_millis(window_ms)).unwrap();
        let window_us = window_ms.cast_signed() * 1_000;
        let base = (START_MS * 1_000).div_euclid(window_us) * window_us;
        let mut windows = Windows::new(pace, 100);
        for n in -3..500 {
            windows.add(Timestamp::from_micros(base + n * window_us), 0);
        }
        for (offset, random) in before {
            place(&mut windows, Timestamp::from_micros(base + offset), random);
        }
        let requested = Timestamp::from_micros(base + (into % (window_ms * 1_000)).cast_signed());
        let mut forecaster = Forecaster::new(pace, requested, load);
        for (start, count, _) in windows.changed().filter(|(start, ..)| start.as_micros() >= base) {
            if forecaster.add_window(start, count) {
                break;
            }
        }
        let forecast = forecaster.finish().unwrap();
        let starts: Vec<_> =
            (0..load).map(|random| place(&mut windows, requested, random).window_start).collect();
        let mut distinct = starts.clone();
        distinct.dedup();
        prop_assert_eq!(forecast.first_window, starts[0]);
        prop_assert_eq!(forecast.last_window, *starts.last().unwrap());
        prop_assert_eq!(forecast.windows, distinct.len() as u64);
    }

    #[test]
    fn the_share_never_grows_as_time_passes(max in 1_u32..1_000, window_ms in 1_u64..100_000, a in 0_u64..100_000_000, b in 0_u64..100_000_000) {
        let pace = Pace::new(max, Duration::from_millis(window_ms)).unwrap();
        let into = |n: u64| Timestamp::from_micros((n % (window_ms * 1_000)).cast_signed());
        let (early, late) = (into(a).min(into(b)), into(a).max(into(b)));
        prop_assert!(pace.capacity_from(early) >= pace.capacity_from(late));
        prop_assert!(pace.capacity_from(early) <= max);
        prop_assert_eq!(pace.capacity_from(Timestamp::EPOCH), max);
    }
}
