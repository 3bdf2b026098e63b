//! The plan for a batch of events, which both SQL engines carry out: they load and lock windows when the plan asks for
//! them, and save what it says.
//!
//! Events are placed as if they came one after the other. An event that needs to know of more windows stays behind, and no
//! later one gets a place that it might still want.

use std::collections::{BTreeMap, HashMap, HashSet};

use weir_core::slot::{Pace, WindowSearchError, WindowStatus, Windows};
use weir_core::{ConfigName, EventId, Timestamp};

use super::{Assign, AssignOutcome, Slot};

/// A batch on its way.
#[derive(Debug)]
pub struct AssignPlan<'a> {
    batch: &'a [Assign],
    existing: HashMap<EventId, Slot>,
    configs: HashMap<&'a ConfigName, Windows>,
    /// Where in the batch the events are that still need a slot.
    open: Vec<usize>,
    /// By their places in the batch.
    placed: BTreeMap<usize, Slot>,
}

/// What has to happen next.
#[derive(Debug, PartialEq, Eq)]
pub enum PlanStep<'a> {
    /// Windows have to be looked at, with [`AssignPlan::windows`] told of them; then the plan goes on.
    Load(Vec<WindowQuery<'a>>),
    /// Others hold the windows that are left within the headroom.
    WindowsLocked,
    /// Every event has its outcome.
    Done,
}

/// Windows that have to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowQuery<'a> {
    /// Whose.
    pub config: &'a ConfigName,
    /// The first of them.
    pub from: Timestamp,
    /// For how many events.
    pub events: u32,
}

/// A window's counter as it has to be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCounter<'a> {
    /// Whose.
    pub config: &'a ConfigName,
    /// The start of the window.
    pub start: Timestamp,
    /// Its events.
    pub count: u32,
    /// Whether it has room for more.
    pub status: WindowStatus,
}

impl<'a> AssignPlan<'a> {
    /// A plan for a batch, of whose events some have slots, and of whose configs these are active.
    #[must_use]
    pub fn new(
        batch: &'a [Assign],
        existing: impl IntoIterator<Item = Slot>,
        paces: &HashMap<ConfigName, Pace>,
        headroom: u32,
    ) -> Self {
        let existing: HashMap<_, _> = existing.into_iter().map(|slot| (slot.event.clone(), slot)).collect();
        let (mut configs, mut open, mut seen) = (HashMap::new(), Vec::new(), HashSet::new());
        for (place, Assign { event, config, .. }) in batch.iter().enumerate() {
            if let Some(pace) = paces.get(config)
                && !existing.contains_key(event)
                && seen.insert(event)
            {
                configs.entry(config).or_insert_with(|| Windows::new(*pace, headroom));
                open.push(place);
            }
        }
        Self { batch, existing, configs, open, placed: BTreeMap::new() }
    }

    /// Places events as far as windows are known; `random` decides on their times.
    pub fn place(&mut self, mut random: impl FnMut() -> u64) -> PlanStep<'a> {
        let mut needs: BTreeMap<(&ConfigName, Timestamp), u32> = BTreeMap::new();
        // The first window of each config that an event before might want.
        let mut limits: HashMap<&ConfigName, Timestamp> = HashMap::new();
        for place in std::mem::take(&mut self.open) {
            let Assign { event, config, requested } = &self.batch[place];
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
                    self.placed.insert(place, slot);
                }
                Ok(_) => self.open.push(place),
                Err(WindowSearchError::NotLoaded(from)) => {
                    *needs.entry((config, from)).or_default() += 1;
                    limits.insert(config, limit.map_or(from, |limit| limit.min(from)));
                    self.open.push(place);
                }
                Err(WindowSearchError::Locked) => return PlanStep::WindowsLocked,
                Err(WindowSearchError::AllFull) => {}
            }
        }
        if self.open.is_empty() {
            return PlanStep::Done;
        }
        let need = |((config, from), events)| WindowQuery { config, from, events };
        PlanStep::Load(needs.into_iter().map(need).collect())
    }

    /// What is known of a config's windows.
    pub fn windows(&mut self, config: &ConfigName) -> Option<&mut Windows> {
        self.configs.get_mut(config)
    }

    /// The new slots, in the order of the batch.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = &Slot> {
        self.placed.values()
    }

    /// The counters that change.
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

    /// The windows behind those that become full. Each has to have a counter, so that the run of full ones has an end.
    pub fn follow_ups(&self) -> impl Iterator<Item = (&'a ConfigName, Timestamp)> + '_ {
        let full = self.counters().filter(|counter| counter.status == WindowStatus::Closed);
        full.filter_map(|counter| {
            Some((counter.config, self.configs.get(counter.config)?.next_window(counter.start)?))
        })
    }

    /// Takes note that others were faster with these events, which have other slots than planned.
    pub fn use_existing(&mut self, slots: impl IntoIterator<Item = Slot>) {
        let theirs: HashMap<_, _> = slots.into_iter().map(|slot| (slot.event.clone(), slot)).collect();
        self.placed.retain(|_, slot| !theirs.contains_key(&slot.event));
        self.existing.extend(theirs);
    }

    /// One outcome for each event, in order.
    #[must_use]
    pub fn outcomes(self) -> Vec<AssignOutcome> {
        let Self { batch, existing, configs, mut placed, .. } = self;
        let mut new: HashMap<&EventId, Slot> = HashMap::new();
        let outcome = |(place, assign): (usize, &'a Assign)| match placed.remove(&place) {
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
