//! Slot: single events go through lanes, bulk loads come as batches already, the rest straight to the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use weir_core::slot::{Forecast, Forecaster, Pace};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::slot::{Assign, AssignOutcome, Slot, SlotConfig, SlotStore, WindowCount};
use weir_store::{BoundedCache, Lanes, Result};

use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::labels::OutcomeLabels;
use crate::telemetry::metrics::Metrics;

/// How long a config that was read is good for. Assigning never uses one: the store reads it with the windows.
const CACHE_FOR: Duration = Duration::from_secs(5);
/// Configs in the cache.
const CACHE_MAX: usize = 10_000;

/// Counters read at a time for a forecast.
const FORECAST_PAGE: usize = 10_000;

/// Slot.
pub struct SlotService {
    store: Arc<dyn SlotStore>,
    lanes: Lanes<Assign, AssignOutcome>,
    /// Configs by name, with the time each was asked for; `None` for a name that has none.
    cache: BoundedCache<ConfigName, (Instant, Option<SlotConfig>)>,
    timeout: Duration,
    counters: Counters,
}

#[derive(Debug)]
struct Counters {
    new: Counter,
    existing: Counter,
    unknown_config: Counter,
    exhausted: Counter,
    failed: Counter,
}

impl SlotService {
    /// Starts the lanes. A config is always in the same lane, so its events do not pass each other over.
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
        let counter = |outcome| metrics.slot.assignments.get_or_create_owned(&OutcomeLabels { outcome });
        let counters = Counters {
            new: counter("new"),
            existing: counter("existing"),
            unknown_config: counter("unknown_config"),
            exhausted: counter("exhausted"),
            failed: counter("failed"),
        };
        Self {
            store,
            lanes,
            cache: BoundedCache::new(1, CACHE_MAX),
            timeout: settings.http.timeout,
            counters,
        }
    }

    /// Makes a new version of a config the active one. When that takes longer than a call may, it goes on.
    pub async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig> {
        let (store, wanted) = (Arc::clone(&self.store), name.clone());
        let put = tokio::spawn(async move { store.put_config(&wanted, pace).await });
        let put = async { put.await.unwrap_or_else(|panic| Err(weir_store::Error::failed("slot", panic))) };
        let config = within(self.timeout, put).await;
        self.cache.invalidate(name);
        config
    }

    /// The active version of a config, at most five seconds old.
    pub async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>> {
        if let Some((_, config)) = self.cache.get(name, is_fresh) {
            return Ok(config);
        }
        let (version, asked_at) = (self.cache.version(), Instant::now());
        let config = within(self.timeout, self.store.config(name)).await?;
        self.cache.insert(name.clone(), (asked_at, config.clone()), version, is_fresh);
        Ok(config)
    }

    /// Active configs in order of name.
    pub async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>> {
        within(self.timeout, self.store.configs(after, limit)).await
    }

    /// Takes a config out of service; false when it is not in service.
    pub async fn deactivate(&self, name: &ConfigName) -> Result<bool> {
        let gone = within(self.timeout, self.store.deactivate(name)).await;
        self.cache.invalidate(name);
        gone
    }

    /// Forgets what was read of configs.
    pub fn flush_cache(&self) {
        self.cache.invalidate_all();
    }

    /// Gives one event a slot.
    /// Fails when the lane is full or the store does not answer.
    pub async fn assign(&self, assign: Assign) -> Result<AssignOutcome> {
        let (config, begun) = (assign.config.clone(), Instant::now());
        // The lane itself answers in time.
        let mut outcome = self.lanes.submit(config.as_str(), assign).await;
        if let Ok(AssignOutcome::Recounting(assign)) = outcome {
            let submit = |assign: Assign| self.lanes.submit(config.as_str(), assign);
            let counted = assign_when_counted(&*self.store, assign, submit);
            outcome = within(self.timeout.saturating_sub(begun.elapsed()), counted).await;
        }
        match &outcome {
            Ok(outcome) => self.count(outcome),
            Err(_) => self.count_failed(),
        }
        outcome
    }

    /// Gives many events slots, in order, in one commit. Those whose config is being counted anew wait for that, for as long
    /// as a call may take.
    pub async fn assign_batch(&self, batch: Vec<Assign>) -> Result<Vec<AssignOutcome>> {
        let begun = Instant::now();
        let mut outcomes = self.store.assign_batch(batch.into()).await;
        if let Ok(outcomes) = &mut outcomes {
            let rest = assign_rest_when_counted(&*self.store, outcomes);
            // What has no slot by then stays as it is.
            let _ = within(self.timeout.saturating_sub(begun.elapsed()), rest).await;
        }
        match &outcomes {
            Ok(outcomes) => outcomes.iter().for_each(|outcome| self.count(outcome)),
            Err(_) => self.count_failed(),
        }
        outcomes
    }

    /// An event's slot.
    pub async fn find(&self, event: &EventId) -> Result<Option<Slot>> {
        within(self.timeout, self.store.find_slot(event)).await
    }

    /// Gives an event's place back.
    pub async fn give_back(&self, event: &EventId) -> Result<Option<Slot>> {
        within(self.timeout, self.store.release_slot(event)).await
    }

    /// How full a config's windows are.
    pub async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>> {
        within(self.timeout, self.store.windows(config, from, to, limit)).await
    }

    /// Where a load of so many events for one time would end, were it assigned now. None for a config that is not in
    /// service.
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
            let is_done = page.iter().any(|window| forecaster.take(window.start, window.count));
            match page.last() {
                Some(last) if !is_done && page.len() == FORECAST_PAGE => {
                    from = config.pace.window_after(last.start, 1)
                }
                _ => break,
            }
        }
        Ok(forecaster.finish().map(|forecast| (config, forecast)))
    }

    /// Takes no new events and waits for those under way.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }

    fn count_failed(&self) {
        self.counters.failed.inc();
    }

    fn count(&self, outcome: &AssignOutcome) {
        match outcome {
            AssignOutcome::New(_) => self.counters.new.inc(),
            AssignOutcome::Existing(_) => self.counters.existing.inc(),
            AssignOutcome::UnknownConfig => self.counters.unknown_config.inc(),
            AssignOutcome::Exhausted => self.counters.exhausted.inc(),
            AssignOutcome::Recounting(_) => self.counters.failed.inc(),
        };
    }
}

/// Sends an event again whenever its config was counted, until it has another answer.
async fn assign_when_counted<F>(
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

/// The same for the events of a batch.
async fn assign_rest_when_counted(store: &dyn SlotStore, outcomes: &mut [AssignOutcome]) -> Result<()> {
    loop {
        let (mut places, mut rest) = (Vec::new(), Vec::new());
        for (place, outcome) in outcomes.iter().enumerate() {
            if let AssignOutcome::Recounting(assign) = outcome {
                places.push(place);
                rest.push(assign.clone());
            }
        }
        let Some(first) = rest.first() else { return Ok(()) };
        store.wait_for_recount(&first.config).await?;
        for (place, outcome) in places.into_iter().zip(store.assign_batch(rest.into()).await?) {
            outcomes[place] = outcome;
        }
    }
}

/// Whether a config, or that there is none, was read so lately that it may be told again.
fn is_fresh((asked_at, _): &(Instant, Option<SlotConfig>)) -> bool {
    asked_at.elapsed() < CACHE_FOR
}

#[cfg(test)]
mod tests;
