//! The plan for a batch of events, which both SQL engines execute: they load and lock the windows that it asks for and
//! save the slots and counters it returns.
//!
//! The result is as if events were placed one after the other. If an event needs windows that are not loaded yet, it is
//! deferred, and later events cannot take a window that it might still get.

use std::collections::{BTreeMap, HashMap, HashSet};

use weir_core::slot::{Pace, WindowSearchError, WindowStatus, Windows};
use weir_core::{ConfigName, EventId, Timestamp};

use super::{Assign, AssignOutcome, Slot};

/// The state of a batch while its events are being placed.
#[derive(Debug)]
pub struct AssignPlan<'a> {
    batch: &'a [Assign],
    existing: HashMap<EventId, Slot>,
    configs: HashMap<&'a ConfigName, Windows>,
    /// Indices in the batch of the events that still need a slot.
    open: Vec<usize>,
    /// New slots by index in the batch.
    placed: BTreeMap<usize, Slot>,
}

/// What the engine has to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum PlanStep<'a> {
    /// Load these windows into [`AssignPlan::windows`] and call [`AssignPlan::place`] again.
    Load(Vec<WindowQuery<'a>>),
    /// The remaining windows within the headroom are locked by other transactions.
    WindowsLocked,
    /// Every event has its outcome.
    Done,
}

/// The windows of a config to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowQuery<'a> {
    pub config: &'a ConfigName,
    /// The first window.
    pub from: Timestamp,
    /// How many events have to be placed.
    pub events: u32,
}

/// A window's counter to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCounter<'a> {
    pub config: &'a ConfigName,
    pub start: Timestamp,
    pub count: u32,
    pub status: WindowStatus,
}

impl<'a> AssignPlan<'a> {
    /// `existing` has the slots that events of the batch already have, `paces` the active configs.
    #[must_use]
    pub fn new(
        batch: &'a [Assign],
        existing: impl IntoIterator<Item = Slot>,
        paces: &HashMap<ConfigName, Pace>,
        headroom: u32,
    ) -> Self {
        let existing: HashMap<_, _> = existing.into_iter().map(|slot| (slot.event.clone(), slot)).collect();
        let (mut configs, mut open, mut seen) = (HashMap::new(), Vec::new(), HashSet::new());
        for (index, Assign { event, config, .. }) in batch.iter().enumerate() {
            if let Some(pace) = paces.get(config)
                && !existing.contains_key(event)
                && seen.insert(event)
            {
                configs.entry(config).or_insert_with(|| Windows::new(*pace, headroom));
                open.push(index);
            }
        }
        Self { batch, existing, configs, open, placed: BTreeMap::new() }
    }

    /// Places events as far as their windows are loaded. `random` selects the time within a window.
    pub fn place(&mut self, mut random: impl FnMut() -> u64) -> PlanStep<'a> {
        let mut queries: BTreeMap<(&ConfigName, Timestamp), u32> = BTreeMap::new();
        // The first window of each config that a deferred event might get.
        let mut limits: HashMap<&ConfigName, Timestamp> = HashMap::new();
        for index in std::mem::take(&mut self.open) {
            let Assign { event, config, requested } = &self.batch[index];
            let Some(windows) = self.configs.get_mut(config) else { continue };
            let limit = limits.get(config).copied();
            match windows.find(*requested) {
                Ok(start) if limit.is_none_or(|limit| start < limit) => {
                    let Some(found) = windows.assign(start, *requested, random()) else { continue };
                    let slot = Slot {
                        event: event.clone(),
                        config: config.clone(),
                        requested: *requested,
                        window_start: found.window_start,
                        scheduled: found.scheduled,
                    };
                    self.placed.insert(index, slot);
                }
                Ok(_) => self.open.push(index),
                Err(WindowSearchError::NotLoaded(from)) => {
                    *queries.entry((config, from)).or_default() += 1;
                    limits.insert(config, limit.map_or(from, |limit| limit.min(from)));
                    self.open.push(index);
                }
                Err(WindowSearchError::Locked) => return PlanStep::WindowsLocked,
                Err(WindowSearchError::AllFull) => {}
            }
        }
        if self.open.is_empty() {
            return PlanStep::Done;
        }
        let query = |((config, from), events)| WindowQuery { config, from, events };
        PlanStep::Load(queries.into_iter().map(query).collect())
    }

    /// The loaded windows of a config.
    pub fn windows(&mut self, config: &ConfigName) -> Option<&mut Windows> {
        self.configs.get_mut(config)
    }

    /// The new slots, in the order of the batch.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = &Slot> {
        self.placed.values()
    }

    /// The counters to save.
    pub fn counters(&self) -> impl Iterator<Item = WindowCounter<'a>> + '_ {
        self.configs.iter().flat_map(|(&config, windows)| {
            windows.changed().map(move |(start, count, status)| WindowCounter {
                config,
                start,
                count,
                status,
            })
        })
    }

    /// The windows after those that become full. Each needs a counter: it marks the end of the run of full windows.
    pub fn follow_ups(&self) -> impl Iterator<Item = (&'a ConfigName, Timestamp)> + '_ {
        let full = self.counters().filter(|counter| counter.status == WindowStatus::Closed);
        full.filter_map(|counter| {
            Some((counter.config, self.configs.get(counter.config)?.next_window(counter.start)?))
        })
    }

    /// Replaces planned slots by those that other transactions have inserted for the same events.
    pub fn use_existing(&mut self, slots: impl IntoIterator<Item = Slot>) {
        let theirs: HashMap<_, _> = slots.into_iter().map(|slot| (slot.event.clone(), slot)).collect();
        self.placed.retain(|_, slot| !theirs.contains_key(&slot.event));
        self.existing.extend(theirs);
    }

    /// Returns one outcome per event, in order.
    #[must_use]
    pub fn outcomes(self) -> Vec<AssignOutcome> {
        let Self { batch, existing, configs, mut placed, .. } = self;
        let mut new: HashMap<&EventId, Slot> = HashMap::new();
        let outcome = |(index, assign): (usize, &'a Assign)| match placed.remove(&index) {
            Some(slot) => {
                new.insert(&assign.event, slot.clone());
                AssignOutcome::New(slot)
            }
            None => match existing.get(&assign.event).or_else(|| new.get(&assign.event)) {
                Some(slot) => AssignOutcome::Existing(slot.clone()),
                None if configs.contains_key(&assign.config) => AssignOutcome::Exhausted,
                None => AssignOutcome::UnknownConfig,
            },
        };
        batch.iter().enumerate().map(outcome).collect()
    }
}

#[cfg(test)]
mod tests;
