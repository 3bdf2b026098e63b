//! Holds: settling, expiry, audits and purges.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{Correction, HoldSettlement};
use weir_core::{Clock, HoldId};
use weir_store::tier::{HoldAudit, NewHold, SettledHold, TierStore};

use super::fixtures::{MINUTE, policy_name};
use crate::HasLimits;

fn id(n: u8) -> HoldId {
    HoldId::new(crate::START, [n; 10])
}

async fn hold<H: HasLimits>(h: &H, store: &dyn TierStore, n: u8, cost: u32) -> HoldId {
    let hold = NewHold {
        id: id(n),
        policy: policy_name("p"),
        scope: 3,
        key: "k\u{e9}y".to_owned(),
        cost,
        taken_at: h.clock().now(),
        ttl: MINUTE,
    };
    let expires_at = store.put_hold(hold).await.expect("put_hold must succeed");
    assert_eq!(expires_at, h.clock().now().plus(MINUTE));
    id(n)
}

async fn settle(store: &dyn TierStore, id: HoldId, cost: u32) -> SettledHold {
    store.settle_hold(id, cost).await.expect("settle_hold must succeed").expect("there is such a hold")
}

pub async fn a_hold_is_settled_once<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    for (n, cost, correction) in [
        (1, 4, Correction::GiveBack(6)),
        (2, 10, Correction::None),
        (3, 25, Correction::Charge(15)),
        (4, 0, Correction::GiveBack(10)),
        (5, u32::MAX, Correction::Charge(u32::MAX - 10)),
    ] {
        let id = hold(&h, &*store, n, 10).await;
        let first = settle(&*store, id, cost).await;
        assert_eq!(first.settlement, HoldSettlement::Settled(correction));
        assert_eq!((first.policy.as_str(), first.scope, first.key.as_str()), ("p", 3, "k\u{e9}y"));
        for other in [cost, 7] {
            let again = settle(&*store, id, other).await;
            assert_eq!((again.settlement, again.hold), (HoldSettlement::AlreadySettled(cost), first.hold));
        }
    }
}

pub async fn a_hold_expires_exactly_when_its_time_is_over<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let (late, on_time) = (hold(&h, &*store, 1, 10).await, hold(&h, &*store, 2, 10).await);
    h.clock().advance(MINUTE - Duration::from_micros(1));
    assert!(matches!(settle(&*store, on_time, 1).await.settlement, HoldSettlement::Settled(_)));
    h.clock().advance(Duration::from_micros(1));
    for _ in 0..2 {
        assert_eq!(settle(&*store, late, 1).await.settlement, HoldSettlement::Expired);
    }
    assert_eq!(settle(&*store, on_time, 5).await.settlement, HoldSettlement::AlreadySettled(1));
}

pub async fn an_unknown_hold_is_not_an_error<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    assert_eq!(store.settle_hold(id(9), 1).await.expect("an answer"), None);
}

pub async fn parallel_settlements_correct_once<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let id = hold(&h, &*store, 1, 10).await;
    let tasks: Vec<_> = (0..16)
        .map(|cost| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { settle(&*store, id, cost).await.settlement })
        })
        .collect();
    let mut corrected = 0;
    for task in tasks {
        corrected += u32::from(matches!(task.await.expect("an answer"), HoldSettlement::Settled(_)));
    }
    assert_eq!(corrected, 1);
}

pub async fn every_hold_is_open_settled_or_expired<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let audit = async || store.audit_holds().await.expect("an answer");
    assert_eq!(audit().await, HoldAudit::default());
    for n in 1..=3 {
        hold(&h, &*store, n, 10 * u32::from(n)).await;
    }
    settle(&*store, id(1), 4).await;
    assert_eq!(audit().await, HoldAudit { holds: 3, open: 2, open_cost: 50, settled: 1, expired: 0 });
    h.clock().advance(MINUTE - Duration::from_micros(1));
    settle(&*store, id(2), 20).await;
    assert_eq!(audit().await, HoldAudit { holds: 3, open: 1, open_cost: 30, settled: 2, expired: 0 });
    h.clock().advance(Duration::from_micros(1));
    assert_eq!(settle(&*store, id(3), 0).await.settlement, HoldSettlement::Expired);
    assert_eq!(audit().await, HoldAudit { holds: 3, open: 0, open_cost: 0, settled: 2, expired: 1 });
}

pub async fn old_holds_are_purged<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let old = hold(&h, &*store, 1, 10).await;
    h.clock().advance(Duration::from_secs(3_600));
    let young = hold(&h, &*store, 2, 10).await;
    h.clock().advance(MINUTE + Duration::from_secs(1));
    assert_eq!(store.purge_holds(MINUTE, 10).await.expect("an answer"), 1);
    assert_eq!(store.settle_hold(old, 1).await.expect("an answer"), None);
    assert_eq!(settle(&*store, young, 1).await.settlement, HoldSettlement::Expired);
    assert_eq!(store.purge_holds(MINUTE, 10).await.expect("an answer"), 0);
}
