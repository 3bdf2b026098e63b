//! Slot: payments per time window.
//!
//! Time is cut into windows of one size, aligned to the epoch. An event goes into the window of the time it asks for, or
//! else into the first later one that has room, and gets a random time inside it. A window that has begun when the event
//! wants to run offers only the share of its places that the rest of its time is worth.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Timestamp;

/// How many events may run in how long a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    max_per_window: u32,
    window_ms: u64,
}

/// A number that a [`Pace`] does not take. The messages finish the sentence "maxPerWindow …" or "windowSize …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PaceError {
    /// Not from 1 to [`Pace::MAX_PER_WINDOW`].
    #[error("must be an integer from 1 to {}", Pace::MAX_PER_WINDOW)]
    MaxPerWindow,
    /// Not whole milliseconds from 1 ms to [`Pace::MAX_WINDOW`].
    #[error("must be a duration of whole milliseconds from 1 millisecond to 366 days, such as PT4S")]
    WindowSize,
}

impl Pace {
    /// The largest number of events in a window: what a Postgres `INT` holds.
    pub const MAX_PER_WINDOW: u32 = i32::MAX.unsigned_abs();
    /// The longest window.
    pub const MAX_WINDOW: Duration = Duration::from_secs(366 * 86_400);

    /// Checks and joins the two.
    /// Fails when either is out of range.
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

    /// Events in a window.
    #[must_use]
    pub const fn max_per_window(&self) -> u32 {
        self.max_per_window
    }

    /// The length of a window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_millis(self.window_ms)
    }

    /// The start of the window that `at` is in.
    #[must_use]
    pub fn window_of(&self, at: Timestamp) -> Timestamp {
        let into = at.as_micros().checked_rem_euclid(self.window_us()).unwrap_or(0);
        Timestamp::from_micros(at.as_micros().saturating_sub(into))
    }

    /// The start of the window `count` windows after the one that begins at `start`.
    #[must_use]
    pub fn window_after(&self, start: Timestamp, count: u64) -> Timestamp {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        Timestamp::from_micros(start.as_micros().saturating_add(self.window_us().saturating_mul(count)))
    }

    /// How many places a window offers to events that want to run at `requested`, inside it: all of them at its start,
    /// later the share that is left of its time, rounded down.
    #[must_use]
    pub fn capacity_from(&self, requested: Timestamp) -> u32 {
        if self.first_ms(requested) >= self.window_ms {
            return 0;
        }
        let (window, into) = (i128::from(self.window_us()), self.elapsed_us(requested));
        let left = window.saturating_sub(into);
        let capacity_from = i128::from(self.max_per_window).saturating_mul(left).checked_div(window);
        capacity_from.and_then(|capacity_from| u32::try_from(capacity_from).ok()).unwrap_or(0)
    }

    /// A time in the window that begins at `start`, not before `requested`; `chance` decides which millisecond. None
    /// when no millisecond of the window is left.
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

    /// The first whole millisecond of its window that is not before `requested`.
    fn first_ms(&self, requested: Timestamp) -> u64 {
        let into_us = u64::try_from(self.elapsed_us(requested)).unwrap_or(u64::MAX);
        into_us.div_ceil(1_000)
    }
}

/// Where an event was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAssignment {
    /// The start of its window.
    pub window_start: Timestamp,
    /// Its time inside it.
    pub scheduled: Timestamp,
}

/// Whether a window takes more events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowStatus {
    /// It has room.
    Open,
    /// It is full.
    Closed,
}

impl WindowStatus {
    /// The status of a window with so many events.
    #[must_use]
    pub const fn from_count(count: u32, pace: &Pace) -> Self {
        if count < pace.max_per_window { Self::Open } else { Self::Closed }
    }
}

/// What is known of a config's windows: which have room, which others hold, which are full. Of the rest nothing is known
/// until an engine has looked.
#[derive(Clone, Debug)]
pub struct Windows {
    pace: Pace,
    /// How many windows past the first one with room are searched.
    headroom: u32,
    /// Windows with room, and how many events each has.
    open: BTreeMap<Timestamp, u32>,
    locked: BTreeSet<Timestamp>,
    /// Runs of full windows: where each begins, and the first window behind it. No two touch.
    full: BTreeMap<Timestamp, Timestamp>,
    /// Windows that events were put into, and how many each has now.
    changed: BTreeMap<Timestamp, u32>,
}

/// Why no window was found for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowSearchError {
    /// The window that begins here has to be looked at first.
    NotLoaded(Timestamp),
    /// Others hold the windows of the headroom.
    Locked,
    /// All windows up to the end of time are full.
    AllFull,
}

impl Windows {
    /// Nothing is known yet.
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

    /// The pace they follow.
    #[must_use]
    pub const fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Adds a window that may be used and has so many events. What was done here is newer than what is read later.
    pub fn add(&mut self, start: Timestamp, count: u32) {
        if self.is_known_open_or_full(start) {
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

    /// Adds a window that has room and that others hold.
    pub fn add_locked(&mut self, start: Timestamp) {
        if !self.is_known_open_or_full(start) {
            self.locked.insert(start);
        }
    }

    /// Adds a run of full windows, from the one that begins at `start` up to the one that begins at `end`.
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

    /// The window for an event: that of the time it asks for, while it has a share left, or else the first later one
    /// with room.
    /// Fails when there is none, or more has to be known to say which.
    pub fn find(&self, requested: Timestamp) -> Result<Timestamp, WindowSearchError> {
        let (first, capacity_from) = (self.pace.window_of(requested), self.pace.capacity_from(requested));
        match self.open.get(&first) {
            Some(count) if *count < capacity_from => return Ok(first),
            None if capacity_from > 0
                && !self.is_known_open_or_full(first)
                && !self.locked.contains(&first) =>
            {
                return Err(WindowSearchError::NotLoaded(first));
            }
            _ => {}
        }
        self.search(first)
    }

    /// Puts an event into a window that was found for it; `chance` decides on its time.
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

    /// The windows that events were put into, how many each has now, and whether it has room for more.
    pub fn changed(&self) -> impl Iterator<Item = (Timestamp, u32, WindowStatus)> + '_ {
        self.changed
            .iter()
            .map(|(start, count)| (*start, *count, WindowStatus::from_count(*count, &self.pace)))
    }

    /// The window behind another; none at the end of time.
    #[must_use]
    pub fn next_window(&self, start: Timestamp) -> Option<Timestamp> {
        let next = self.pace.window_after(start, 1);
        (next > start && self.pace.window_of(next) == next).then_some(next)
    }

    /// The first window after `first` that may be used, no further than the headroom from the first that others hold.
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

    /// Whether a window is known to be open or full.
    fn is_known_open_or_full(&self, start: Timestamp) -> bool {
        self.open.contains_key(&start) || self.end_of_full_run(start).is_some()
    }

    /// The first window behind the run of full ones that a window is in.
    fn end_of_full_run(&self, at: Timestamp) -> Option<Timestamp> {
        self.full.range(..=at).next_back().map(|(_, end)| *end).filter(|end| *end > at)
    }
}

/// Where a load would end, were it assigned now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// The window of its first event.
    pub first_window: Timestamp,
    /// The window of its last event.
    pub last_window: Timestamp,
    /// How many windows it would use.
    pub windows: u64,
}

/// Follows a load through the windows without assigning it. Counters are taken in order; windows between them are empty.
#[derive(Clone, Debug)]
pub struct Forecaster {
    pace: Pace,
    requested: Timestamp,
    left: u64,
    /// The first window that was not looked at.
    next: Timestamp,
    used: Option<Forecast>,
}

impl Forecaster {
    /// A load of so many events for one time.
    #[must_use]
    pub fn new(pace: Pace, requested: Timestamp, events: u64) -> Self {
        Self { pace, requested, left: events, next: pace.window_of(requested), used: None }
    }

    /// Takes the next counter. True once the whole load has found room.
    pub fn take(&mut self, start: Timestamp, count: u32) -> bool {
        self.fill_empty(Some(start));
        if self.left > 0 && start == self.next {
            let room = self.offer(start).saturating_sub(count);
            self.place(start, u64::from(room), 1);
            self.next = self.pace.window_after(start, 1);
        }
        self.left == 0
    }

    /// What the load comes to, with nothing but empty windows behind the last counter. None for a load of nothing.
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

    /// Uses the empty windows up to `until`: the first one, which may offer less, then as many whole ones as it takes.
    fn fill_empty(&mut self, until: Option<Timestamp>) {
        if self.left > 0
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
        let needed = self.left.div_ceil(u64::from(self.pace.max_per_window())).min(gap);
        if needed > 0 {
            let room = needed.saturating_mul(u64::from(self.pace.max_per_window()));
            self.place(self.next, room, needed);
        }
        self.next = self.pace.window_after(self.next, if until.is_some() { gap } else { needed });
    }

    /// Puts what fits into `windows` windows from `start` on.
    fn place(&mut self, start: Timestamp, room: u64, windows: u64) {
        let placed = room.min(self.left);
        if placed == 0 {
            return;
        }
        self.left = self.left.saturating_sub(placed);
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
    fn events_go_to_their_window_then_to_the_first_with_room() {
        let mut windows = Windows::new(pace(2, 1_000), 100);
        assert_eq!(windows.find(at(500)), Err(WindowSearchError::NotLoaded(at(0))));
        for start in 0..4 {
            windows.add(at(start * 1_000), 0);
        }
        let starts: Vec<_> = (0..8).map(|_| place(&mut windows, at(500))).collect();
        // Half a window is one place of two.
        let expected = [0, 1_000, 1_000, 2_000, 2_000, 3_000, 3_000].map(|ms| Ok(at(ms)));
        assert_eq!(starts[..7], expected);
        assert_eq!(starts[7], Err(WindowSearchError::NotLoaded(at(4_000))), "nothing else is known");
        let changed: Vec<_> = windows.changed().collect();
        assert_eq!(changed[0], (at(0), 1, WindowStatus::Open));
        assert_eq!(changed[1], (at(1_000), 2, WindowStatus::Closed));
        assert_eq!(place(&mut windows, at(0)), Ok(at(0)), "a whole window offers more");
    }

    #[test]
    fn a_window_that_nothing_is_known_of_is_not_passed_over() {
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
    fn what_others_hold_is_passed_over_as_far_as_the_headroom() {
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
        assert_eq!(place(&mut windows, at(0)), Ok(at(2_000)), "whoever locked it is done");
    }

    #[test]
    fn time_ends() {
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
    fn a_pace_has_bounds() {
        assert_eq!(Pace::new(0, Duration::from_secs(1)), Err(PaceError::MaxPerWindow));
        assert_eq!(Pace::new(1, Duration::ZERO), Err(PaceError::WindowSize));
        assert_eq!(Pace::new(1, Duration::from_nanos(1_500_000)), Err(PaceError::WindowSize));
        assert!(Pace::new(Pace::MAX_PER_WINDOW, Pace::MAX_WINDOW).is_ok());
        assert!(Pace::new(1, Pace::MAX_WINDOW.saturating_add(Duration::from_millis(1))).is_err());
    }
}
