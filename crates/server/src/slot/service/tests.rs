//! Events that are handed back because their config is being counted anew.

use async_trait::async_trait;
use parking_lot::Mutex;
use weir_store::slot::SlotAudit;
use weir_store::{Batch, Error, LaneMetrics, LaneSettings};

use super::*;

/// A store that counts `busy` anew for so many batches, and then has room for everybody.
#[derive(Default)]
struct Recounting {
    left: Mutex<usize>,
    /// The events of each batch.
    batches: Mutex<Vec<Vec<String>>>,
    is_full: bool,
    /// Whether a recount never ends.
    waits: bool,
}

#[async_trait]
impl SlotStore for Recounting {
    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
        let batch = batch.take();
        self.batches.lock().push(batch.iter().map(|assign| assign.event.to_string()).collect());
        let mut left = self.left.lock();
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
        if self.waits {
            std::future::pending::<()>().await;
        }
        if self.is_full { Err(Error::Overloaded { lane: "slot recount" }) } else { Ok(()) }
    }

    async fn put_config(&self, _: &ConfigName, _: Pace) -> Result<SlotConfig> {
        unreachable!()
    }

    async fn config(&self, _: &ConfigName) -> Result<Option<SlotConfig>> {
        unreachable!()
    }

    async fn configs(&self, _: Option<&ConfigName>, _: usize) -> Result<Vec<SlotConfig>> {
        unreachable!()
    }

    async fn deactivate(&self, _: &ConfigName) -> Result<bool> {
        unreachable!()
    }

    async fn find_slot(&self, _: &EventId) -> Result<Option<Slot>> {
        unreachable!()
    }

    async fn release_slot(&self, _: &EventId) -> Result<Option<Slot>> {
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

    async fn audit_slots(&self) -> Result<SlotAudit> {
        unreachable!()
    }
}

fn slot(Assign { event, config, requested }: Assign) -> Slot {
    Slot { event, config, requested, window_start: requested, scheduled: requested }
}

fn wish(event: &str, config: &str) -> Assign {
    let (event, config) = (EventId::parse(event).unwrap(), ConfigName::parse(config).unwrap());
    Assign { event, config, requested: Timestamp::EPOCH }
}

#[tokio::test]
async fn an_event_is_sent_again_whenever_its_config_was_counted() {
    let store = Recounting { left: Mutex::new(2), ..Recounting::default() };
    let submit = |assign: Assign| async {
        let outcomes = store.assign_batch(vec![assign].into()).await?;
        Ok(outcomes.into_iter().next().unwrap())
    };
    let outcome = assign_when_counted(&store, wish("e", "busy"), submit).await.unwrap();
    assert_eq!(outcome, AssignOutcome::New(slot(wish("e", "busy"))));
    assert_eq!(store.batches.lock().len(), 3);
}

#[tokio::test]
async fn of_a_batch_only_what_was_handed_back_is_sent_again_and_answers_keep_their_places() {
    let store = Recounting { left: Mutex::new(2), ..Recounting::default() };
    let batch = [wish("a", "busy"), wish("b", "idle"), wish("c", "busy"), wish("d", "idle")];
    let mut outcomes = store.assign_batch(batch.to_vec().into()).await.unwrap();
    assign_rest_when_counted(&store, &mut outcomes).await.unwrap();
    assert_eq!(outcomes, batch.map(|assign| AssignOutcome::New(slot(assign))));
    let expected = [vec!["a", "b", "c", "d"], vec!["a", "c"], vec!["a", "c"]];
    assert_eq!(*store.batches.lock(), expected);
}

#[tokio::test]
async fn where_too_many_wait_the_rest_of_a_batch_keeps_its_answers() {
    let store = Recounting { left: Mutex::new(9), is_full: true, ..Recounting::default() };
    let batch = [wish("a", "busy"), wish("b", "idle")];
    let mut outcomes = store.assign_batch(batch.to_vec().into()).await.unwrap();
    let refused = assign_rest_when_counted(&store, &mut outcomes).await;
    assert!(matches!(refused, Err(Error::Overloaded { .. })));
    let [a, b] = batch;
    assert_eq!(outcomes, [AssignOutcome::Recounting(a), AssignOutcome::New(slot(b))]);
}

fn service(store: Arc<Recounting>, timeout: Duration) -> SlotService {
    let settings = LaneSettings { lanes: 1, capacity: 10, batch_max: 10, in_flight: 1, timeout };
    let lanes = Lanes::start("slot", settings, LaneMetrics::default(), &[], {
        let store = Arc::clone(&store);
        move |batch| {
            let store = Arc::clone(&store);
            async move { store.assign_batch(batch).await }
        }
    });
    let counters = Counters {
        new: Counter::default(),
        existing: Counter::default(),
        unknown_config: Counter::default(),
        exhausted: Counter::default(),
        failed: Counter::default(),
    };
    SlotService { store, lanes, cache: BoundedCache::new(1, CACHE_MAX), timeout, counters }
}

#[tokio::test(start_paused = true)]
async fn calls_and_lines_wait_for_a_recount_and_no_longer_than_a_call_may() {
    let counting = |left| Arc::new(Recounting { left: Mutex::new(left), ..Recounting::default() });
    let timeout = Duration::from_secs(2);
    let soon = service(counting(3), timeout);
    let outcome = soon.assign(wish("e", "busy")).await.unwrap();
    assert_eq!(outcome, AssignOutcome::New(slot(wish("e", "busy"))));
    let soon = service(counting(3), timeout);
    let outcomes = soon.assign_batch(vec![wish("e", "busy"), wish("f", "idle")]).await.unwrap();
    assert_eq!(
        outcomes,
        [wish("e", "busy"), wish("f", "idle")].map(|assign| AssignOutcome::New(slot(assign)))
    );
    let never = Recounting { left: Mutex::new(usize::MAX), waits: true, ..Recounting::default() };
    let never = service(Arc::new(never), timeout);
    let begun = tokio::time::Instant::now();
    assert!(never.assign(wish("e", "busy")).await.unwrap_err().is_transient());
    assert_eq!(begun.elapsed(), timeout, "virtual time");
    let outcomes = never.assign_batch(vec![wish("e", "busy"), wish("f", "idle")]).await.unwrap();
    let [e, f] = [wish("e", "busy"), wish("f", "idle")];
    assert_eq!(outcomes, [AssignOutcome::Recounting(e), AssignOutcome::New(slot(f))]);
    assert_eq!(begun.elapsed(), 2 * timeout, "virtual time");
}
