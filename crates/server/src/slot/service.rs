//! Slot: single events go through lanes. Bulk loads, which are batches already, and all other calls go straight to the
//! store.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use weir_core::slot::{Forecast, Forecaster, Pace};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::slot::{
    Assign, AssignOutcome, MoveOutcome, Slot, SlotConfig, SlotConfigVersion, SlotPosition, SlotStore,
    WindowCount,
};
use weir_store::{BoundedCache, Lanes, Result};

use super::events::{AssignmentFailed, SlotDecided};
use super::metrics::SlotMetrics;
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;

/// How long a config stays in the cache. Assigning does not use the cache: the store reads the config with the windows.
const CACHE_FOR: Duration = Duration::from_secs(5);
/// Configs in the cache.
const CACHE_MAX: usize = 10_000;

/// Windows read at a time for a forecast.
const FORECAST_PAGE: usize = 10_000;

pub struct SlotService {
    store: Arc<dyn SlotStore>,
    lanes: Lanes<Assign, AssignOutcome>,
    /// Configs by name, with the time at which the store was asked; `None` if no active config has the name.
    cache: Arc<BoundedCache<ConfigName, (Instant, Option<SlotConfig>)>>,
    timeout: Duration,
    metrics: SlotMetrics,
}

impl SlotService {
    /// Starts the lanes. A config always uses the same lane, so its events keep their order.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = Arc::clone(&engines.store.slots);
        let lanes = engines.start_lanes("slot", metrics.lane("slot"), {
            let store = Arc::clone(&store);
            move |batch| {
                let store = Arc::clone(&store);
                async move { store.assign_batch(batch).await }
            }
        });
        Self {
            store,
            lanes,
            cache: Arc::new(BoundedCache::new(1, CACHE_MAX)),
            timeout: settings.http.timeout,
            metrics: metrics.slot.clone(),
        }
    }

    /// Creates a version of a config and activates it. The change continues when it takes longer than the call's timeout.
    pub async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig> {
        let (store, config) = (Arc::clone(&self.store), name.clone());
        self.change(name, async move { store.put_config(&config, pace).await }).await
    }

    /// Changes a config and drops it from the cache afterwards, even when the call has timed out or the caller is gone: a read
    /// that begins before the change ends cannot leave the old version in the cache.
    async fn change<T: Send + 'static>(
        &self,
        name: &ConfigName,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (cache, name) = (Arc::clone(&self.cache), name.clone());
        let changing = tokio::spawn(async move {
            let outcome = change.await;
            cache.invalidate(&name);
            outcome
        });
        let changed =
            async { changing.await.unwrap_or_else(|panic| Err(weir_store::Error::failed("slot", panic))) };
        within(self.timeout, changed).await
    }

    /// Returns the active version of a config, at most five seconds old.
    pub async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>> {
        if let Some((_, config)) = self.cache.get(name, is_fresh) {
            return Ok(config);
        }
        let (version, asked_at) = (self.cache.version(), Instant::now());
        let config = within(self.timeout, self.store.config(name)).await?;
        self.cache.insert(name.clone(), (asked_at, config.clone()), version, is_fresh);
        Ok(config)
    }

    /// Lists active configs in order of name.
    pub async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>> {
        within(self.timeout, self.store.configs(after, limit)).await
    }

    /// Lists all versions of a config, newest first, before version `before`.
    pub async fn config_versions(
        &self,
        name: &ConfigName,
        before: Option<u32>,
        limit: usize,
    ) -> Result<Vec<SlotConfigVersion>> {
        within(self.timeout, self.store.config_versions(name, before, limit)).await
    }

    /// Deactivates a config. Returns false if it is not active.
    pub async fn deactivate(&self, name: &ConfigName) -> Result<bool> {
        let (store, config) = (Arc::clone(&self.store), name.clone());
        self.change(name, async move { store.deactivate(&config).await }).await
    }

    pub fn flush_cache(&self) {
        self.cache.invalidate_all();
    }

    /// Assigns a slot to one event. Fails when the lane is full or the store does not answer in time.
    pub async fn assign(&self, assign: Assign) -> Result<AssignOutcome> {
        let (config, started) = (assign.config.clone(), Instant::now());
        // The lane enforces the timeout.
        let mut outcome = self.lanes.submit(config.as_str(), assign).await;
        if let Ok(AssignOutcome::Recounting(assign)) = outcome {
            let submit = |assign: Assign| self.lanes.submit(config.as_str(), assign);
            let assigned = assign_after_recount(&*self.store, assign, submit);
            outcome = within(self.timeout.saturating_sub(started.elapsed()), assigned).await;
        }
        match &outcome {
            Ok(outcome) => SlotDecided { outcome }.emit(&self.metrics),
            Err(_) => AssignmentFailed.emit(&self.metrics),
        }
        outcome
    }

    /// Assigns slots to many events, in order, in one commit. Events whose config is being recounted wait for the recount, up
    /// to the call's timeout.
    pub async fn assign_batch(&self, batch: Vec<Assign>) -> Result<Vec<AssignOutcome>> {
        let started = Instant::now();
        let mut outcomes = self.store.assign_batch(batch.into()).await;
        if let Ok(outcomes) = &mut outcomes {
            let rest = assign_rest_after_recount(&*self.store, outcomes);
            // Events without a slot by then keep the outcome `Recounting`.
            let _ = within(self.timeout.saturating_sub(started.elapsed()), rest).await;
        }
        match &outcomes {
            Ok(outcomes) => outcomes.iter().for_each(|outcome| SlotDecided { outcome }.emit(&self.metrics)),
            Err(_) => AssignmentFailed.emit(&self.metrics),
        }
        outcomes
    }

    pub async fn find(&self, event: &EventId) -> Result<Option<Slot>> {
        within(self.timeout, self.store.find_slot(event)).await
    }

    /// Releases an event's slot and returns it.
    pub async fn release(&self, event: &EventId) -> Result<Option<Slot>> {
        within(self.timeout, self.store.release_slot(event)).await
    }

    /// Gives an event another slot of its config and frees the one it has.
    pub async fn move_slot(&self, event: &EventId, requested: Timestamp) -> Result<MoveOutcome> {
        within(self.timeout, self.store.move_slot(event, requested)).await
    }

    /// Lists how many slots each window of a config has. Windows without slots are left out.
    pub async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>> {
        within(self.timeout, self.store.windows(config, from, to, limit)).await
    }

    /// Lists the slots of a config that are scheduled before `to` and come after `after`.
    pub async fn slots(
        &self,
        config: &ConfigName,
        after: SlotPosition,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<Slot>> {
        within(self.timeout, self.store.slots(config, after, to, limit)).await
    }

    /// Returns the windows that a load of `events` events would use if it were assigned now. `None` if the config is not
    /// active.
    pub async fn forecast(
        &self,
        name: &ConfigName,
        requested: Timestamp,
        events: u64,
    ) -> Result<Option<(SlotConfig, Forecast)>> {
        let Some(config) = within(self.timeout, self.store.config(name)).await? else { return Ok(None) };
        let mut forecaster = Forecaster::new(config.pace, requested, events);
        let mut from = config.pace.window_of(requested);
        loop {
            let page = self.windows(name, from, Timestamp::from_micros(i64::MAX / 32), FORECAST_PAGE).await?;
            let is_done = page.iter().any(|window| forecaster.add_window(window.start, window.count));
            match page.last() {
                Some(last) if !is_done && page.len() == FORECAST_PAGE => {
                    from = config.pace.window_after(last.start, 1)
                }
                _ => break,
            }
        }
        Ok(forecaster.finish().map(|forecast| (config, forecast)))
    }

    /// Accepts no more events and waits for those in flight.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }
}

/// Submits an event again after each recount of its config, until it gets another outcome.
async fn assign_after_recount<F>(
    store: &dyn SlotStore,
    mut assign: Assign,
    submit: impl Fn(Assign) -> F,
) -> Result<AssignOutcome>
where
    F: Future<Output = Result<AssignOutcome>>,
{
    loop {
        store.wait_for_recount(&assign.config).await?;
        match submit(assign).await? {
            AssignOutcome::Recounting(again) => assign = again,
            outcome => return Ok(outcome),
        }
    }
}

/// Submits the events of a batch that are still `Recounting` again, until all have another outcome.
async fn assign_rest_after_recount(store: &dyn SlotStore, outcomes: &mut [AssignOutcome]) -> Result<()> {
    loop {
        let (mut indexes, mut rest) = (Vec::new(), Vec::new());
        for (index, outcome) in outcomes.iter().enumerate() {
            if let AssignOutcome::Recounting(assign) = outcome {
                indexes.push(index);
                rest.push(assign.clone());
            }
        }
        let Some(first) = rest.first() else { return Ok(()) };
        store.wait_for_recount(&first.config).await?;
        for (index, outcome) in indexes.into_iter().zip(store.assign_batch(rest.into()).await?) {
            outcomes[index] = outcome;
        }
    }
}

/// Whether a cached config is recent enough to be returned.
fn is_fresh((asked_at, _): &(Instant, Option<SlotConfig>)) -> bool {
    asked_at.elapsed() < CACHE_FOR
}

#[cfg(test)]
mod tests;
