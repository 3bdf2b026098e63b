//! Permits of concurrency policies.

use std::sync::Arc;
use std::time::Duration;

use weir_core::PermitId;
use weir_core::tier::{Concurrency, Decision, LimitDenial, PermitRelease};
use weir_store::tier::{
    ChangedDefinition, ConcurrencySpec, OnOutage, Origin, PermitAsk, PermitsOutcome, PolicySpec, TakePermits,
    TierStore,
};

use super::fixtures::{MINUTE, fixed, policy_name};
use crate::HasLimits;

const TTL: Duration = Duration::from_secs(30);

fn spec(limit: u32) -> ConcurrencySpec {
    ConcurrencySpec::plain(Concurrency::new(limit, TTL).expect("the suite's limits are valid"))
}

fn ask(id: PermitId, scope: u32, limit: u32, key: &str, cost: u32) -> PermitAsk {
    PermitAsk { id, policy: policy_name("p"), scope, spec: spec(limit), key: key.to_owned(), cost }
}

fn id() -> PermitId {
    PermitId::new(crate::START, fastrand::u128(..).to_le_bytes()[..10].try_into().expect("ten bytes"))
}

async fn take(store: &dyn TierStore, asks: Vec<PermitAsk>) -> PermitsOutcome {
    let mut outcomes = store.take_permits(vec![TakePermits { asks, peek: false }]).await.expect("an answer");
    assert_eq!(outcomes.len(), 1);
    outcomes.remove(0)
}

/// Takes one permit of a key. Returns its id if it was given.
async fn take_one(store: &dyn TierStore, limit: u32, key: &str, cost: u32) -> Option<PermitId> {
    let id = id();
    let outcome = take(store, vec![ask(id, 1, limit, key, cost)]).await;
    assert_eq!(outcome.decision.is_allowed(), outcome.each[0].2, "an allowed permit is given");
    outcome.decision.is_allowed().then_some(id)
}

async fn release(store: &dyn TierStore, id: PermitId) -> Option<PermitRelease> {
    store.release_permit(id).await.expect("an answer").map(|released| released.release)
}

pub async fn no_more_permits_are_open_than_the_limit<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let first = take_one(&*store, 3, "k", 2).await.expect("there is room");
    let second = take_one(&*store, 3, "k", 1).await.expect("there is room");
    assert_eq!(take_one(&*store, 3, "k", 1).await, None);
    assert!(take_one(&*store, 3, "other", 3).await.is_some(), "keys are apart");
    assert_eq!(release(&*store, first).await, Some(PermitRelease::Released));
    assert_eq!(take_one(&*store, 3, "k", 3).await, None);
    assert!(take_one(&*store, 3, "k", 2).await.is_some());
    assert_eq!(release(&*store, first).await, Some(PermitRelease::AlreadyReleased));
    assert_eq!(take_one(&*store, 3, "k", 1).await, None, "a permit is given back once");
    assert_eq!(release(&*store, second).await, Some(PermitRelease::Released));
    assert_eq!(release(&*store, id()).await, None);
}

pub async fn a_permit_ends_exactly_when_its_time_is_over<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let dead = take_one(&*store, 1, "k", 1).await.expect("there is room");
    let micro = Duration::from_micros(1);
    h.clock().advance(TTL - micro);
    let denied = take(&*store, vec![ask(id(), 1, 1, "k", 1)]).await;
    let denial = LimitDenial { denied_by: 0, retry_after: Some(micro) };
    assert_eq!(denied.decision, Decision::Denied(denial));
    assert_eq!((denied.each[0].1.remaining, denied.each[0].1.reset_after), (0, micro));
    h.clock().advance(micro);
    let next = take_one(&*store, 1, "k", 1).await.expect("the holder may have died");
    assert_eq!(release(&*store, dead).await, Some(PermitRelease::Expired));
    assert_eq!(take_one(&*store, 1, "k", 1).await, None, "an expired permit gives nothing back");
    assert_eq!(release(&*store, next).await, Some(PermitRelease::Released));
    h.clock().advance(MINUTE);
    assert_eq!(release(&*store, next).await, Some(PermitRelease::AlreadyReleased), "the same answer");
}

pub async fn permits_are_taken_together_or_not_at_all<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let both = || vec![ask(id(), 1, 2, "a", 1), ask(id(), 2, 1, "b", 1)];
    assert!(take(&*store, both()).await.decision.is_allowed());
    let denied = take(&*store, both()).await;
    let denial = LimitDenial { denied_by: 1, retry_after: Some(TTL) };
    assert_eq!(denied.decision, Decision::Denied(denial));
    assert_eq!(denied.each.iter().map(|each| each.2).collect::<Vec<_>>(), [false, false]);
    let batch = (0..3).map(|_| TakePermits { asks: vec![ask(id(), 1, 2, "a", 1)], peek: false });
    let outcomes = store.take_permits(batch.collect()).await.expect("an answer");
    let allowed: Vec<_> = outcomes.iter().map(|outcome| outcome.decision.is_allowed()).collect();
    assert_eq!(allowed, [true, false, false], "a batch is decided in order");
    let peek = TakePermits { asks: vec![ask(id(), 3, 1, "a", 1)], peek: true };
    for _ in 0..2 {
        let outcomes = store.take_permits(vec![peek.clone()]).await.expect("an answer");
        assert!(outcomes[0].decision.is_allowed() && !outcomes[0].each[0].2, "a peek takes nothing");
    }
}

pub async fn voided_and_reset_permits_are_free_at_once<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let void = take_one(&*store, 1, "k", 1).await.expect("there is room");
    store.void_permits(vec![void, id()]).await.expect("an answer");
    assert_eq!(release(&*store, void).await, None);
    let reset = take_one(&*store, 1, "k", 1).await.expect("there is room again");
    let other = take_one(&*store, 1, "other", 1).await.expect("there is room");
    store.reset_permits(1, "k").await.expect("an answer");
    assert_eq!(release(&*store, reset).await, None);
    assert!(take_one(&*store, 1, "k", 1).await.is_some());
    assert_eq!(release(&*store, other).await, Some(PermitRelease::Released));
}

/// What is open at any time, over all servers, by the records of the takers: they count a permit before they give it back.
pub async fn parallel_takers_never_pass_the_limit<H: HasLimits>() {
    let h = Arc::new(H::open().await);
    if h.definitions().is_none() {
        return;
    }
    let second = h.second_server().await.map(Arc::new);
    let servers: Vec<_> = [Some(Arc::clone(&h)), second].into_iter().flatten().collect();
    let open = Arc::new(std::sync::atomic::AtomicI64::new(0));
    let tasks: Vec<_> = (0..16)
        .map(|n| {
            let store = servers[n % servers.len()].definitions().expect("every server has definitions");
            let open = Arc::clone(&open);
            tokio::spawn(async move {
                let mut taken = 0;
                for _ in 0..12 {
                    let Some(id) = take_one(&*store, 3, "hot", 1).await else { continue };
                    taken += 1;
                    let now = open.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} are in use");
                    tokio::task::yield_now().await;
                    open.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    assert_eq!(release(&*store, id).await, Some(PermitRelease::Released));
                }
                taken
            })
        })
        .collect();
    let mut taken = 0;
    for task in tasks {
        taken += task.await.expect("a taker");
    }
    assert!(taken >= 3, "{taken} were taken");
    let store = h.definitions().expect("it has definitions");
    assert!(take_one(&*store, 3, "hot", 3).await.is_some(), "all of them were given back");
}

pub async fn permits_survive_a_restart<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let held = take_one(&*store, 1, "k", 1).await.expect("there is room");
    drop(store);
    let h = h.reopen().await;
    let store = h.definitions().expect("the engine has definitions");
    assert_eq!(take_one(&*store, 1, "k", 1).await, None);
    assert_eq!(release(&*store, held).await, Some(PermitRelease::Released));
    assert!(take_one(&*store, 1, "k", 1).await.is_some());
}

pub async fn old_permits_are_purged<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let mut ids = Vec::new();
    for key in ["a", "b", "c"] {
        ids.push(take_one(&*store, 1, key, 1).await.expect("there is room"));
    }
    assert_eq!(release(&*store, ids[0]).await, Some(PermitRelease::Released));
    h.clock().advance(TTL + MINUTE);
    assert_eq!(store.purge_permits(MINUTE, 10).await.expect("an answer"), 0);
    h.clock().advance(Duration::from_micros(1));
    assert_eq!(store.purge_permits(MINUTE, 2).await.expect("an answer"), 2);
    assert_eq!(store.purge_permits(MINUTE, 2).await.expect("an answer"), 1);
    assert_eq!(release(&*store, ids[1]).await, None);
}

pub async fn a_name_is_that_of_one_policy_of_any_kind<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let name = policy_name("p");
    let (limit, rich) =
        (PolicySpec::plain(fixed(5)), ConcurrencySpec { shadow: true, on_outage: OnOutage::Open, ..spec(7) });
    let put = async |origin| store.put_concurrency(&name, &rich, origin).await.expect("an answer");
    store.put_policy(&name, &limit, Origin::Operator).await.expect("an answer");
    assert_eq!(put(Origin::File).await, None, "a file does not replace an operator's");
    let start = store.changes_since(None).await.expect("an answer").version;
    let first = put(Origin::Operator).await.expect("the maximum of policies is not reached");
    assert_eq!((first.spec, &first.name), (rich, &name));
    assert_eq!(store.policies().await.expect("an answer"), []);
    assert_eq!(store.concurrency_policies().await.expect("an answer"), std::slice::from_ref(&first));
    if store.is_shared() {
        let changes = store.changes_since(Some(start)).await.expect("an answer").changed;
        assert_eq!(changes.as_deref(), Some(&[ChangedDefinition::Definitions][..]));
    }
    let other = ConcurrencySpec { shadow: false, ..rich };
    let again = store.put_concurrency(&name, &other, Origin::Operator).await.expect("an answer");
    assert_eq!(again.map(|policy| (policy.scope, policy.spec)), Some((first.scope, other)));
    assert_eq!(store.put_policy(&name, &limit, Origin::File).await.expect("an answer"), None);
    store.put_policy(&name, &limit, Origin::Operator).await.expect("an answer").expect("it replaces");
    assert_eq!(store.concurrency_policies().await.expect("an answer"), []);
    put(Origin::Operator).await.expect("it replaces");
    assert!(store.delete_policy(&name).await.expect("an answer"));
    assert!(!store.delete_policy(&name).await.expect("an answer"));
    let last = put(Origin::File).await.expect("nobody has the name");
    assert!(last.scope > first.scope, "a scope is not reused");
}
