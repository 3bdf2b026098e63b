//! Events that are returned because their config is being recounted, and the cache of configs.

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_store::slot::SlotAudit;
use weir_store::{Batch, Error, LaneMetrics, LaneSettings};

use super::*;

/// A store that is recounting the config `busy` for the first batches and assigns a slot to every other event.
#[derive(Default)]
struct RecountingStore {
    /// Batches during which the recount still runs.
    recounting_batches: Mutex<usize>,
    /// The events of each batch.
    batches: Mutex<Vec<Vec<String>>>,
    /// Whether too many calls wait for the recount.
    is_full: bool,
    is_endless: bool,
    /// The version of the config that is active, and gates at which reads, after they have read it, and changes, before they
    /// change it, stop.
    active: Mutex<u32>,
    read_gate: Option<Gate>,
    change_gate: Option<Gate>,
}

/// Stops calls until they are let through, one at a time.
#[derive(Default)]
struct Gate {
    reached: Notify,
    opened: Notify,
}

impl Gate {
    async fn pass(gate: Option<&Self>) {
        if let Some(gate) = gate {
            gate.reached.notify_one();
            gate.opened.notified().await;
        }
    }
}

#[async_trait]
impl SlotStore for RecountingStore {
    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
        let batch = batch.take();
        self.batches.lock().push(batch.iter().map(|assign| assign.event.to_string()).collect());
        let mut left = self.recounting_batches.lock();
        let is_counting = *left > 0;
        *left = left.saturating_sub(1);
        let outcome = |assign: Assign| match assign.config.as_str() {
            "busy" if is_counting => AssignOutcome::Recounting(assign),
            _ => AssignOutcome::New(slot(assign)),
        };
        Ok(batch.into_iter().map(outcome).collect())
    }

    async fn wait_for_recount(&self, config: &ConfigName) -> Result<()> {
        assert_eq!(config.as_str(), "busy");
        if self.is_endless {
            std::future::pending::<()>().await;
        }
        if self.is_full { Err(Error::Overloaded { lane: "slot recount" }) } else { Ok(()) }
    }

    async fn put_config(&self, _: &ConfigName, _: Pace) -> Result<SlotConfig> {
        Gate::pass(self.change_gate.as_ref()).await;
        *self.active.lock() += 1;
        Ok(version(*self.active.lock()))
    }

    async fn config(&self, _: &ConfigName) -> Result<Option<SlotConfig>> {
        let read = version(*self.active.lock());
        Gate::pass(self.read_gate.as_ref()).await;
        Ok(Some(read))
    }

    async fn configs(&self, _: Option<&ConfigName>, _: usize) -> Result<Vec<SlotConfig>> {
        unreachable!()
    }

    async fn config_versions(
        &self,
        _: &ConfigName,
        _: Option<u32>,
        _: usize,
    ) -> Result<Vec<SlotConfigVersion>> {
        unreachable!()
    }

    async fn slots(&self, _: &ConfigName, _: SlotPosition, _: Timestamp, _: usize) -> Result<Vec<Slot>> {
        unreachable!()
    }

    async fn deactivate(&self, _: &ConfigName) -> Result<bool> {
        *self.active.lock() += 1;
        Ok(true)
    }

    async fn find_slot(&self, _: &EventId) -> Result<Option<Slot>> {
        unreachable!()
    }

    async fn release_slot(&self, _: &EventId) -> Result<Option<Slot>> {
        unreachable!()
    }

    async fn move_slot(&self, _: &EventId, _: Timestamp) -> Result<MoveOutcome> {
        unreachable!()
    }

    async fn windows(
        &self,
        _: &ConfigName,
        _: Timestamp,
        _: Timestamp,
        _: usize,
    ) -> Result<Vec<WindowCount>> {
        unreachable!()
    }

    async fn purge_slots(&self, _: Duration, _: usize) -> Result<u64> {
        unreachable!()
    }

    async fn audit_slots(&self) -> Result<SlotAudit> {
        unreachable!()
    }
}

fn slot(Assign { event, config, requested }: Assign) -> Slot {
    Slot { event, config, requested, window_start: requested, scheduled: requested }
}

fn event(id: &str, config: &str) -> Assign {
    let (event, config) = (EventId::parse(id).unwrap(), ConfigName::parse(config).unwrap());
    Assign { event, config, requested: Timestamp::EPOCH }
}

#[tokio::test]
async fn an_event_is_submitted_again_after_each_recount_of_its_config() {
    let store = RecountingStore { recounting_batches: Mutex::new(2), ..RecountingStore::default() };
    let submit = |assign: Assign| async {
        let outcomes = store.assign_batch(vec![assign].into()).await?;
        Ok(outcomes.into_iter().next().unwrap())
    };
    let outcome = assign_after_recount(&store, event("e", "busy"), submit).await.unwrap();
    assert_eq!(outcome, AssignOutcome::New(slot(event("e", "busy"))));
    assert_eq!(store.batches.lock().len(), 3);
}

#[tokio::test]
async fn only_recounting_events_of_a_batch_are_submitted_again_and_outcomes_keep_their_order() {
    let store = RecountingStore { recounting_batches: Mutex::new(2), ..RecountingStore::default() };
    let batch = [event("a", "busy"), event("b", "idle"), event("c", "busy"), event("d", "idle")];
    let mut outcomes = store.assign_batch(batch.to_vec().into()).await.unwrap();
    assign_rest_after_recount(&store, &mut outcomes).await.unwrap();
    assert_eq!(outcomes, batch.map(|assign| AssignOutcome::New(slot(assign))));
    let expected = [vec!["a", "b", "c", "d"], vec!["a", "c"], vec!["a", "c"]];
    assert_eq!(*store.batches.lock(), expected);
}

#[tokio::test]
async fn events_of_a_batch_keep_their_outcomes_when_too_many_calls_wait_for_a_recount() {
    let store =
        RecountingStore { recounting_batches: Mutex::new(9), is_full: true, ..RecountingStore::default() };
    let batch = [event("a", "busy"), event("b", "idle")];
    let mut outcomes = store.assign_batch(batch.to_vec().into()).await.unwrap();
    let refused = assign_rest_after_recount(&store, &mut outcomes).await;
    assert!(matches!(refused, Err(Error::Overloaded { .. })));
    let [a, b] = batch;
    assert_eq!(outcomes, [AssignOutcome::Recounting(a), AssignOutcome::New(slot(b))]);
}

fn service(store: Arc<RecountingStore>, timeout: Duration) -> SlotService {
    let settings = LaneSettings { lanes: 1, capacity: 10, batch_max: 10, in_flight: 1, timeout };
    let lanes = Lanes::start("slot", settings, LaneMetrics::default(), &[], {
        let store = Arc::clone(&store);
        move |batch| {
            let store = Arc::clone(&store);
            async move { store.assign_batch(batch).await }
        }
    });
    SlotService {
        store,
        lanes,
        cache: Arc::new(BoundedCache::new(1, CACHE_MAX)),
        timeout,
        metrics: SlotMetrics::default(),
    }
}

#[tokio::test(start_paused = true)]
async fn single_events_and_batches_wait_for_a_recount_up_to_the_timeout() {
    let store = |batches| {
        Arc::new(RecountingStore { recounting_batches: Mutex::new(batches), ..RecountingStore::default() })
    };
    let timeout = Duration::from_secs(2);
    let soon = service(store(3), timeout);
    let outcome = soon.assign(event("e", "busy")).await.unwrap();
    assert_eq!(outcome, AssignOutcome::New(slot(event("e", "busy"))));
    let soon = service(store(3), timeout);
    let outcomes = soon.assign_batch(vec![event("e", "busy"), event("f", "idle")]).await.unwrap();
    assert_eq!(
        outcomes,
        [event("e", "busy"), event("f", "idle")].map(|assign| AssignOutcome::New(slot(assign)))
    );
    let never = RecountingStore {
        recounting_batches: Mutex::new(usize::MAX),
        is_endless: true,
        ..RecountingStore::default()
    };
    let never = service(Arc::new(never), timeout);
    let started = tokio::time::Instant::now();
    assert!(never.assign(event("e", "busy")).await.unwrap_err().is_transient());
    assert_eq!(started.elapsed(), timeout, "virtual time");
    let outcomes = never.assign_batch(vec![event("e", "busy"), event("f", "idle")]).await.unwrap();
    let [e, f] = [event("e", "busy"), event("f", "idle")];
    assert_eq!(outcomes, [AssignOutcome::Recounting(e), AssignOutcome::New(slot(f))]);
    assert_eq!(started.elapsed(), 2 * timeout, "virtual time");
}

fn version(version: u32) -> SlotConfig {
    let pace = Pace::new(1, Duration::from_secs(1)).unwrap();
    SlotConfig { name: ConfigName::parse("c").unwrap(), version, pace, created_at: Timestamp::EPOCH }
}

async fn cached_version(service: &SlotService) -> u32 {
    service.config(&ConfigName::parse("c").unwrap()).await.unwrap().unwrap().version
}

#[tokio::test]
async fn a_read_that_began_before_a_change_does_not_put_the_old_version_back() {
    let name = ConfigName::parse("c").unwrap();
    for change in ["put", "deactivate", "flush"] {
        let store =
            Arc::new(RecountingStore { read_gate: Some(Gate::default()), ..RecountingStore::default() });
        let gate = store.read_gate.as_ref().unwrap();
        let service = Arc::new(service(Arc::clone(&store), Duration::from_secs(60)));
        let read = || {
            let service = Arc::clone(&service);
            tokio::spawn(async move { cached_version(&service).await })
        };
        let early = read();
        gate.reached.notified().await;
        match change {
            "put" => drop(service.put_config(&name, version(1).pace).await.unwrap()),
            "deactivate" => assert!(service.deactivate(&name).await.unwrap()),
            // Another server changed it, and this one is told to forget what it knows.
            _ => {
                *store.active.lock() += 1;
                service.flush_cache();
            }
        }
        gate.opened.notify_one();
        assert_eq!(early.await.unwrap(), 0, "{change}: it was read before");
        let mut late = read();
        tokio::select! {
            () = gate.reached.notified() => gate.opened.notify_one(),
            cached = &mut late => panic!("{change}: version {cached:?} is from the cache"),
        }
        assert_eq!(late.await.unwrap(), 1, "{change}");
        assert_eq!(cached_version(&service).await, 1, "{change}: now it is cached");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_that_outlasts_its_call_still_replaces_the_cached_version() {
    let store =
        Arc::new(RecountingStore { change_gate: Some(Gate::default()), ..RecountingStore::default() });
    let service = service(Arc::clone(&store), Duration::from_secs(2));
    let name = ConfigName::parse("c").unwrap();
    assert!(service.put_config(&name, version(1).pace).await.unwrap_err().is_transient());
    assert_eq!(cached_version(&service).await, 0, "the change has not happened");
    store.change_gate.as_ref().unwrap().opened.notify_one();
    while *store.active.lock() == 0 {
        tokio::task::yield_now().await;
    }
    tokio::task::yield_now().await;
    assert_eq!(cached_version(&service).await, 1, "without waiting for the cache to expire");
}

#[tokio::test(start_paused = true)]
async fn a_cached_config_is_read_again_after_five_seconds() {
    let store = Arc::new(RecountingStore::default());
    let service = service(Arc::clone(&store), Duration::from_secs(2));
    assert_eq!(cached_version(&service).await, 0);
    *store.active.lock() = 1;
    tokio::time::advance(Duration::from_millis(4_999)).await;
    assert_eq!(cached_version(&service).await, 0);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(cached_version(&service).await, 1);
}
