//! Permits that the store gives after their caller has stopped waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Semaphore;
use weir_core::tier::{Tier, TierLimits};
use weir_core::{HoldId, ManualClock, PermitId, PolicyName, Timestamp, UserId};
use weir_store::tier::{
    ConcurrencyPolicy, ConcurrencySpec, DefinitionChanges, HoldAudit, NewHold, Origin, PermitsOutcome,
    Policy, PolicySpec, ReleasedPermit, SettledHold, SpentRow, Subscription, SubscriptionTerms, TakePermits,
    TierStore,
};
use weir_store::{Error, Result};

use super::tests::{ServiceFixture, fixture_on};
use super::*;

/// How long a test waits for what must happen.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const SETTINGS: &str = "
    [http]
    timeout = \"300ms\"
    [policies.jobs]
    kind = \"concurrency\"
    limit = 3
    ttl = \"PT1H\"";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The permits are taken when the test says so.
    LateCommit,
    /// The permits are taken at once, and the answer is given when the test says so.
    LateAnswer,
    /// The permits are taken, and the answer is an error.
    Unknown,
}

/// A store whose first batch of permits meets a fault. It has only what a check calls.
struct FaultyStore {
    engine: Arc<dyn TierStore>,
    fault: Fault,
    is_over: AtomicBool,
    has_begun: Semaphore,
    may_go_on: Semaphore,
}

impl FaultyStore {
    async fn wait(&self) {
        self.has_begun.add_permits(1);
        self.may_go_on.acquire().await.unwrap().forget();
    }
}

#[async_trait]
impl TierStore for FaultyStore {
    async fn take_permits(&self, batch: Vec<TakePermits>) -> Result<Vec<PermitsOutcome>> {
        if self.is_over.swap(true, Ordering::SeqCst) {
            return self.engine.take_permits(batch).await;
        }
        if self.fault == Fault::LateCommit {
            self.wait().await;
        }
        let outcomes = self.engine.take_permits(batch).await;
        if self.fault == Fault::LateAnswer {
            self.wait().await;
        }
        if self.fault == Fault::Unknown { Err(Error::unavailable("test", "no answer")) } else { outcomes }
    }
    async fn void_permits(&self, ids: Vec<PermitId>) -> Result<()> {
        self.engine.void_permits(ids).await
    }
    fn is_shared(&self) -> bool {
        false
    }
    async fn put_concurrency(
        &self,
        name: &PolicyName,
        spec: &ConcurrencySpec,
        origin: Origin,
    ) -> Result<Option<ConcurrencyPolicy>> {
        self.engine.put_concurrency(name, spec, origin).await
    }
    async fn concurrency_policies(&self) -> Result<Vec<ConcurrencyPolicy>> {
        self.engine.concurrency_policies().await
    }
    async fn limits_enabled(&self) -> Result<Option<bool>> {
        self.engine.limits_enabled().await
    }
    async fn tiers(&self) -> Result<Vec<(Tier, TierLimits)>> {
        self.engine.tiers().await
    }
    async fn policies(&self) -> Result<Vec<Policy>> {
        self.engine.policies().await
    }
    async fn changes_since(&self, since: Option<i64>) -> Result<DefinitionChanges> {
        self.engine.changes_since(since).await
    }
    async fn subscription(&self, _: &UserId) -> Result<Option<Subscription>> {
        unreachable!()
    }
    async fn subscriptions(&self, _: Option<&UserId>, _: usize) -> Result<Vec<Subscription>> {
        unreachable!()
    }
    async fn put_subscription(&self, _: &UserId, _: SubscriptionTerms) -> Result<Subscription> {
        unreachable!()
    }
    async fn delete_subscription(&self, _: &UserId) -> Result<bool> {
        unreachable!()
    }
    async fn purge_subscriptions(&self, _: usize) -> Result<u64> {
        unreachable!()
    }
    async fn put_limits_enabled(&self, _: bool) -> Result<()> {
        unreachable!()
    }
    async fn put_tier(&self, _: Tier, _: TierLimits) -> Result<()> {
        unreachable!()
    }
    async fn delete_tier(&self, _: Tier) -> Result<()> {
        unreachable!()
    }
    async fn put_policy(&self, _: &PolicyName, _: &PolicySpec, _: Origin) -> Result<Option<Policy>> {
        unreachable!()
    }
    async fn delete_policy(&self, _: &PolicyName) -> Result<bool> {
        unreachable!()
    }
    async fn release_permit(&self, _: PermitId) -> Result<Option<ReleasedPermit>> {
        unreachable!()
    }
    async fn reset_permits(&self, _: u32, _: &str) -> Result<()> {
        unreachable!()
    }
    async fn purge_permits(&self, _: Duration, _: usize) -> Result<u64> {
        unreachable!()
    }
    async fn put_hold(&self, _: NewHold) -> Result<Timestamp> {
        unreachable!()
    }
    async fn settle_hold(&self, _: HoldId, _: u32) -> Result<Option<SettledHold>> {
        unreachable!()
    }
    async fn purge_holds(&self, _: Duration, _: usize) -> Result<u64> {
        unreachable!()
    }
    async fn audit_holds(&self) -> Result<HoldAudit> {
        unreachable!()
    }
    async fn save_spent(&self, _: Vec<SpentRow>) -> Result<()> {
        unreachable!()
    }
    async fn load_spent(&self, _: Option<(u32, String)>, _: usize) -> Result<Vec<SpentRow>> {
        unreachable!()
    }
}

/// Whether all three permits of the policy are given.
async fn takes_all(fixture: &ServiceFixture) -> bool {
    let check = Check { policy: "jobs", key: "u", cost: 3 };
    match fixture.service.check(&[check], CheckOptions::default()).await.unwrap() {
        CheckOutcome::Decided(decision) => decision.allowed,
        CheckOutcome::UnknownPolicy(at) => panic!("the policy at {at} is unknown"),
    }
}

/// Makes a check whose permits meet a fault. `abandon` makes it, and stops waiting for it. Then all permits must be free.
async fn expect_freed(fault: Fault, abandon: impl AsyncFnOnce(Arc<ServiceFixture>, &FaultyStore)) {
    let data = tempfile::tempdir().unwrap();
    let mut store = None;
    let clock = ManualClock::at(Timestamp::from_seconds(1_700_000_000));
    let fixture = fixture_on(data.path(), &clock, SETTINGS, |engine| {
        let (has_begun, may_go_on) = (Semaphore::new(0), Semaphore::new(0));
        let faulty = FaultyStore { engine, fault, is_over: AtomicBool::new(false), has_begun, may_go_on };
        Arc::<FaultyStore>::clone(store.insert(Arc::new(faulty)))
    })
    .await;
    let (fixture, store) = (Arc::new(fixture), store.unwrap());
    abandon(Arc::clone(&fixture), &store).await;
    store.may_go_on.add_permits(1);
    let free = async {
        while !takes_all(&fixture).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, free).await.expect("the permits of a caller who is gone are free");
    assert!(!takes_all(&fixture).await, "they are in use now");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_that_are_taken_after_the_call_has_timed_out_are_free_at_once() {
    for fault in [Fault::LateCommit, Fault::LateAnswer] {
        expect_freed(fault, async |fixture, _| assert!(!takes_all(&fixture).await, "the store is late"))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_caller_who_leaves_are_free_at_once() {
    for fault in [Fault::LateCommit, Fault::LateAnswer] {
        expect_freed(fault, async |fixture, store| {
            let check = tokio::spawn(async move { takes_all(&fixture).await });
            store.has_begun.acquire().await.unwrap().forget();
            check.abort();
            assert!(check.await.unwrap_err().is_cancelled());
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_batch_whose_outcome_is_unknown_are_free_at_once() {
    expect_freed(Fault::Unknown, async |fixture, _| assert!(!takes_all(&fixture).await, "nobody knows"))
        .await;
}
