//! Slot: spreads payments over time windows.
//!
//! Time is divided into windows of one size, aligned to the epoch. An event goes into the window of its requested
//! time, or into the first later window with room, and gets a random time inside it. If the requested time lies within
//! a window, that window offers only the share of its capacity that the rest of its time is worth.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Timestamp;

/// The maximum number of events per window, and the window size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    max_per_window: u32,
    window_ms: u64,
}

/// A number outside the range of a [`Pace`]. The messages complete the sentence "maxPerWindow …" or "windowSize …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PaceError {
    #[error("must be an integer from 1 to {}", Pace::MAX_PER_WINDOW)]
    MaxPerWindow,
    #[error("must be a duration of whole milliseconds from 1 millisecond to 366 days, such as PT4S")]
    WindowSize,
}

impl Pace {
    /// The largest number of events in a window: the maximum of a Postgres `INT`.
    pub const MAX_PER_WINDOW: u32 = i32::MAX.unsigned_abs();
    pub const MAX_WINDOW: Duration = Duration::from_secs(366 * 86_400);

    pub fn new(max_per_window: u32, window: Duration) -> Result<Self, PaceError> {
        if !matches!(max_per_window, 1..=Self::MAX_PER_WINDOW) {
            return Err(PaceError::MaxPerWindow);
        }
        let is_whole = window.subsec_nanos().checked_rem(1_000_000) == Some(0);
        if window.is_zero() || window > Self::MAX_WINDOW || !is_whole {
            return Err(PaceError::WindowSize);
        }
        let window_ms = u64::try_from(window.as_millis()).map_err(|_too_long| PaceError::WindowSize)?;
        Ok(Self { max_per_window, window_ms })
    }

    #[must_use]
    pub const fn max_per_window(&self) -> u32 {
        self.max_per_window
    }

    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_millis(self.window_ms)
    }

    /// Returns the start of the window that contains `at`.
    #[must_use]
    pub fn window_of(&self, at: Timestamp) -> Timestamp {
        let into = at.as_micros().checked_rem_euclid(self.window_us()).unwrap_or(0);
        Timestamp::from_micros(at.as_micros().saturating_sub(into))
    }

    /// Returns the start of the window `count` windows after the one that starts at `start`.
    #[must_use]
    pub fn window_after(&self, start: Timestamp, count: u64) -> Timestamp {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        Timestamp::from_micros(start.as_micros().saturating_add(self.window_us().saturating_mul(count)))
    }

    /// Returns how many events requested for `requested` their own window takes: the maximum at the start of the
    /// window, later the share of the remaining time, rounded down.
    #[must_use]
    pub fn capacity_from(&self, requested: Timestamp) -> u32 {
        if self.first_ms(requested) >= self.window_ms {
            return 0;
        }
        let (window, into) = (i128::from(self.window_us()), self.elapsed_us(requested));
        let time_left = window.saturating_sub(into);
        let capacity = i128::from(self.max_per_window).saturating_mul(time_left).checked_div(window);
        capacity.and_then(|capacity| u32::try_from(capacity).ok()).unwrap_or(0)
    }

    /// Returns a random time in the window that starts at `start`, not before `requested`, or `None` if no millisecond
    /// of the window is left.
    #[must_use]
    pub fn jitter(&self, start: Timestamp, requested: Timestamp, random: u64) -> Option<Timestamp> {
        let first_ms = if start == self.window_of(requested) { self.first_ms(requested) } else { 0 };
        let span = self.window_ms.checked_sub(first_ms).filter(|span| *span > 0)?;
        let offset_ms = first_ms.saturating_add(random.checked_rem(span)?);
        Some(start.plus(Duration::from_millis(offset_ms)))
    }

    const fn window_us(&self) -> i64 {
        self.window_ms.cast_signed().saturating_mul(1_000)
    }

    fn elapsed_us(&self, at: Timestamp) -> i128 {
        i128::from(at.as_micros()).saturating_sub(i128::from(self.window_of(at).as_micros()))
    }

    /// Returns the offset in the window of the first whole millisecond that is not before `requested`.
    fn first_ms(&self, requested: Timestamp) -> u64 {
        let into_us = u64::try_from(self.elapsed_us(requested)).unwrap_or(u64::MAX);
        into_us.div_ceil(1_000)
    }
}

/// The window and the time assigned to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAssignment {
    pub window_start: Timestamp,
    pub scheduled: Timestamp,
}

/// Whether a window has room for more events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowStatus {
    Open,
    Closed,
}

impl WindowStatus {
    #[must_use]
    pub const fn from_count(count: u32, pace: &Pace) -> Self {
        if count < pace.max_per_window { Self::Open } else { Self::Closed }
    }
}

/// The windows of a config as far as an engine has loaded them: those with room, those locked by other transactions
/// and the full ones.
#[derive(Clone, Debug)]
pub struct Windows {
    pace: Pace,
    /// How many windows to search beyond the first locked one.
    headroom: u32,
    /// Windows with room, with their number of events.
    open: BTreeMap<Timestamp, u32>,
    locked: BTreeSet<Timestamp>,
    /// Runs of full windows: the start of the first one, and of the first window after the run. Runs never touch.
    full: BTreeMap<Timestamp, Timestamp>,
    /// Windows that events were assigned to, with their new number of events.
    changed: BTreeMap<Timestamp, u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowSearchError {
    /// The window that starts here must be loaded before the search can continue.
    NotLoaded(Timestamp),
    /// Other transactions have locked all windows within the headroom.
    Locked,
    /// All windows up to the largest timestamp are full.
    AllFull,
}

impl Windows {
    #[must_use]
    pub const fn new(pace: Pace, headroom: u32) -> Self {
        Self {
            pace,
            headroom,
            open: BTreeMap::new(),
            locked: BTreeSet::new(),
            full: BTreeMap::new(),
            changed: BTreeMap::new(),
        }
    }

    #[must_use]
    pub const fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Adds a loaded window with its number of events. If the window is already open or full here, this does nothing:
    /// what was assigned here is newer than what was read.
    pub fn add(&mut self, start: Timestamp, count: u32) {
        if self.is_resolved(start) {
            return;
        }
        self.locked.remove(&start);
        match WindowStatus::from_count(count, &self.pace) {
            WindowStatus::Open => {
                self.open.insert(start, count);
            }
            WindowStatus::Closed => self.add_full(start, self.pace.window_after(start, 1)),
        }
    }

    /// Adds a window that has room and that another transaction has locked.
    pub fn add_locked(&mut self, start: Timestamp) {
        if !self.is_resolved(start) {
            self.locked.insert(start);
        }
    }

    /// Adds a run of full windows from the one that starts at `start` to the one before `end`.
    pub fn add_full(&mut self, start: Timestamp, end: Timestamp) {
        let (mut start, mut end) = (start, end);
        if end <= start {
            return;
        }
        while let Some((&other, &others_end)) = self.full.range(..=end).next_back()
            && others_end >= start
        {
            self.full.remove(&other);
            (start, end) = (start.min(other), end.max(others_end));
        }
        self.full.insert(start, end);
    }

    /// Returns the window of the requested time while its share lasts, otherwise the first later window with room.
    pub fn find(&self, requested: Timestamp) -> Result<Timestamp, WindowSearchError> {
        let (first, capacity) = (self.pace.window_of(requested), self.pace.capacity_from(requested));
        match self.open.get(&first) {
            Some(count) if *count < capacity => return Ok(first),
            None if capacity > 0 && !self.is_resolved(first) && !self.locked.contains(&first) => {
                return Err(WindowSearchError::NotLoaded(first));
            }
            _ => {}
        }
        self.search(first)
    }

    /// Assigns an event to a window that [`find`](Self::find) returned, at a random time.
    pub fn assign(
        &mut self,
        window_start: Timestamp,
        requested: Timestamp,
        random: u64,
    ) -> Option<SlotAssignment> {
        let count = self.open.get(&window_start)?.saturating_add(1);
        let scheduled = self.pace.jitter(window_start, requested, random)?;
        self.changed.insert(window_start, count);
        match WindowStatus::from_count(count, &self.pace) {
            WindowStatus::Open => {
                self.open.insert(window_start, count);
            }
            WindowStatus::Closed => {
                self.open.remove(&window_start);
                self.add_full(window_start, self.pace.window_after(window_start, 1));
            }
        }
        Some(SlotAssignment { window_start, scheduled })
    }

    /// Returns each window that events were assigned to, with its new number of events and its status.
    pub fn changed(&self) -> impl Iterator<Item = (Timestamp, u32, WindowStatus)> + '_ {
        self.changed
            .iter()
            .map(|(start, count)| (*start, *count, WindowStatus::from_count(*count, &self.pace)))
    }

    /// Returns the start of the next window, or `None` at the end of time.
    #[must_use]
    pub fn next_window(&self, start: Timestamp) -> Option<Timestamp> {
        let next = self.pace.window_after(start, 1);
        (next > start && self.pace.window_of(next) == next).then_some(next)
    }

    /// Returns the first window after `first` with room, at most the headroom beyond the first locked one.
    fn search(&self, first: Timestamp) -> Result<Timestamp, WindowSearchError> {
        let mut limit = None;
        let end_of_time = |limit: Option<Timestamp>| {
            if limit.is_some() { WindowSearchError::Locked } else { WindowSearchError::AllFull }
        };
        let mut at = self.next_window(first).ok_or_else(|| end_of_time(limit))?;
        loop {
            if let Some(end) = self.end_of_full_run(at) {
                at = end;
                if self.pace.window_of(at) != at {
                    return Err(end_of_time(limit));
                }
            }
            if limit.is_some_and(|limit| at > limit) {
                return Err(WindowSearchError::Locked);
            }
            if self.open.contains_key(&at) {
                return Ok(at);
            }
            if !self.locked.contains(&at) {
                return Err(WindowSearchError::NotLoaded(at));
            }
            limit = limit.or_else(|| Some(self.pace.window_after(at, u64::from(self.headroom))));
            at = self.next_window(at).ok_or(WindowSearchError::Locked)?;
        }
    }

    fn is_resolved(&self, start: Timestamp) -> bool {
        self.open.contains_key(&start) || self.end_of_full_run(start).is_some()
    }

    /// Returns the first window after the run of full windows that contains `at`.
    fn end_of_full_run(&self, at: Timestamp) -> Option<Timestamp> {
        self.full.range(..=at).next_back().map(|(_, end)| *end).filter(|end| *end > at)
    }
}

/// The windows that a load would use if it were assigned now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    pub first_window: Timestamp,
    pub last_window: Timestamp,
    pub windows: u64,
}

/// Simulates the assignment of a load. Window counts must be added in order; windows between them are empty.
#[derive(Clone, Debug)]
pub struct Forecaster {
    pace: Pace,
    requested: Timestamp,
    remaining: u64,
    /// The first window that was not simulated yet.
    next: Timestamp,
    used: Option<Forecast>,
}

impl Forecaster {
    #[must_use]
    pub fn new(pace: Pace, requested: Timestamp, events: u64) -> Self {
        Self { pace, requested, remaining: events, next: pace.window_of(requested), used: None }
    }

    /// Adds the next window and its number of events. Returns whether the whole load has found room.
    pub fn add_window(&mut self, start: Timestamp, count: u32) -> bool {
        self.fill_empty(Some(start));
        if self.remaining > 0 && start == self.next {
            let room = self.offer(start).saturating_sub(count);
            self.place(start, u64::from(room), 1);
            self.next = self.pace.window_after(start, 1);
        }
        self.remaining == 0
    }

    /// Returns the forecast if all windows after the last added one are empty, or `None` for an empty load.
    #[must_use]
    pub fn finish(mut self) -> Option<Forecast> {
        self.fill_empty(None);
        self.used
    }

    fn offer(&self, start: Timestamp) -> u32 {
        if start == self.pace.window_of(self.requested) {
            self.pace.capacity_from(self.requested)
        } else {
            self.pace.max_per_window()
        }
    }

    /// Fills the empty windows before `until`: the first one, which may offer less, then as many whole ones as the
    /// load needs.
    fn fill_empty(&mut self, until: Option<Timestamp>) {
        if self.remaining > 0
            && self.next == self.pace.window_of(self.requested)
            && until.is_none_or(|end| self.next < end)
        {
            self.place(self.next, u64::from(self.offer(self.next)), 1);
            self.next = self.pace.window_after(self.next, 1);
        }
        let gap = until.map_or(u64::MAX, |end| {
            let gap_us = end.as_micros().saturating_sub(self.next.as_micros()).max(0).unsigned_abs();
            gap_us.checked_div(self.pace.window_us().unsigned_abs()).unwrap_or(0)
        });
        let needed = self.remaining.div_ceil(u64::from(self.pace.max_per_window())).min(gap);
        if needed > 0 {
            let room = needed.saturating_mul(u64::from(self.pace.max_per_window()));
            self.place(self.next, room, needed);
        }
        self.next = self.pace.window_after(self.next, if until.is_some() { gap } else { needed });
    }

    /// Assigns what fits into `windows` windows from `start` on.
    fn place(&mut self, start: Timestamp, room: u64, windows: u64) {
        let placed = room.min(self.remaining);
        if placed == 0 {
            return;
        }
        self.remaining = self.remaining.saturating_sub(placed);
        let last_window = self.pace.window_after(start, windows.saturating_sub(1));
        let before = self.used.map_or(0, |used| used.windows);
        let first_window = self.used.map_or(start, |used| used.first_window);
        self.used = Some(Forecast { first_window, last_window, windows: before.saturating_add(windows) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(max: u32, ms: u64) -> Pace {
        Pace::new(max, Duration::from_millis(ms)).unwrap()
    }

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(ms.saturating_mul(1_000))
    }

    #[test]
    fn windows_are_aligned_to_the_epoch_before_it_too() {
        let pace = pace(1, 4_000);
        assert_eq!(pace.window_of(at(0)), at(0));
        assert_eq!(pace.window_of(at(3_999)), at(0));
        assert_eq!(pace.window_of(at(-1)), at(-4_000));
        assert_eq!(pace.window_after(at(-4_000), 2), at(4_000));
    }

    #[test]
    fn a_window_that_has_begun_offers_a_share() {
        let pace = pace(100, 4_000);
        assert_eq!(pace.capacity_from(at(0)), 100);
        assert_eq!(pace.capacity_from(at(1_000)), 75);
        assert_eq!(pace.capacity_from(at(3_999)), 0, "a hundredth of a place is none");
        assert_eq!(pace.capacity_from(Timestamp::from_micros(3_999_500)), 0, "no whole millisecond is left");
        assert_eq!(pace.jitter(at(0), Timestamp::from_micros(3_999_500), 7), None);
        assert_eq!(pace.jitter(at(0), Timestamp::from_micros(10_500), 0), Some(at(11)));
        assert_eq!(pace.jitter(at(4_000), at(1_000), 5_001), Some(at(5_001)));
    }

    fn place(windows: &mut Windows, requested: Timestamp) -> Result<Timestamp, WindowSearchError> {
        let start = windows.find(requested)?;
        assert_eq!(windows.assign(start, requested, 3).map(|place| place.window_start), Some(start));
        Ok(start)
    }

    #[test]
    fn events_go_to_their_window_or_to_the_next_with_room() {
        let mut windows = Windows::new(pace(2, 1_000), 100);
        assert_eq!(windows.find(at(500)), Err(WindowSearchError::NotLoaded(at(0))));
        for start in 0..4 {
            windows.add(at(start * 1_000), 0);
        }
        let starts: Vec<_> = (0..8).map(|_| place(&mut windows, at(500))).collect();
        // Half a window has room for one event of two.
        let expected = [0, 1_000, 1_000, 2_000, 2_000, 3_000, 3_000].map(|ms| Ok(at(ms)));
        assert_eq!(starts[..7], expected);
        assert_eq!(starts[7], Err(WindowSearchError::NotLoaded(at(4_000))), "nothing else is known");
        let changed: Vec<_> = windows.changed().collect();
        assert_eq!(changed[0], (at(0), 1, WindowStatus::Open));
        assert_eq!(changed[1], (at(1_000), 2, WindowStatus::Closed));
        assert_eq!(place(&mut windows, at(0)), Ok(at(0)), "a whole window offers more");
    }

    #[test]
    fn a_window_that_is_not_loaded_is_not_skipped() {
        let mut windows = Windows::new(pace(1, 1_000), 100);
        windows.add(at(0), 1);
        windows.add(at(5_000), 0);
        assert_eq!(windows.find(at(0)), Err(WindowSearchError::NotLoaded(at(1_000))));
        windows.add_full(at(1_000), at(5_000));
        assert_eq!(place(&mut windows, at(0)), Ok(at(5_000)));
        windows.add(at(5_000), 0);
        assert_eq!(
            windows.find(at(0)),
            Err(WindowSearchError::NotLoaded(at(6_000))),
            "it was filled since it was read"
        );
    }

    #[test]
    fn locked_windows_are_skipped_as_far_as_the_headroom() {
        let mut windows = Windows::new(pace(1, 1_000), 2);
        windows.add_full(at(0), at(1_000));
        windows.add_locked(at(1_000));
        windows.add_locked(at(2_000));
        windows.add(at(3_000), 0);
        windows.add(at(4_000), 0);
        assert_eq!(place(&mut windows, at(0)), Ok(at(3_000)));
        assert_eq!(
            windows.find(at(0)),
            Err(WindowSearchError::Locked),
            "three windows past the first with room is too far"
        );
        assert_eq!(place(&mut windows, at(2_500)), Ok(at(4_000)), "for window_after events it is not");
        windows.add(at(2_000), 0);
        assert_eq!(place(&mut windows, at(0)), Ok(at(2_000)), "the other transaction has ended");
    }

    #[test]
    fn the_search_ends_at_the_end_of_time() {
        let last = pace(1, 1_000).window_of(Timestamp::from_micros(i64::MAX));
        for full_to in [Timestamp::from_micros(i64::MAX), last] {
            let mut windows = Windows::new(pace(1, 1_000), 100);
            windows.add_full(at(0), full_to);
            windows.add(last, 0);
            let outcomes = [place(&mut windows, at(0)), place(&mut windows, at(0))];
            let expected = if full_to == last { Ok(last) } else { Err(WindowSearchError::AllFull) };
            assert_eq!(outcomes, [expected, Err(WindowSearchError::AllFull)]);
        }
    }

    #[test]
    fn a_pace_outside_its_bounds_is_rejected() {
        assert_eq!(Pace::new(0, Duration::from_secs(1)), Err(PaceError::MaxPerWindow));
        assert_eq!(Pace::new(1, Duration::ZERO), Err(PaceError::WindowSize));
        assert_eq!(Pace::new(1, Duration::from_nanos(1_500_000)), Err(PaceError::WindowSize));
        assert!(Pace::new(Pace::MAX_PER_WINDOW, Pace::MAX_WINDOW).is_ok());
        assert!(Pace::new(1, Pace::MAX_WINDOW.saturating_add(Duration::from_millis(1))).is_err());
    }
}
