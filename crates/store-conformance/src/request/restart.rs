//! A restart loses nothing and repeats nothing.

use std::time::Duration;

use weir_core::request::canary::Percent;
use weir_core::request::state::{Refused, Status};
use weir_store::request::{Rollout, Submit};

use super::fixtures::{
    TENANT, URL, accepted, again, begun, books, broken, claim_one, claimed, dead, died, done, found, letters,
    nothing_due, policy, rejected, reported, reported_one, rollout_change, submitted, switched, taken_over,
    tenant, webhooks, wish, wish_for,
};
use crate::HasRequests;
use crate::fixtures::{TICK, limits};

pub async fn everything_stands_as_before<H: HasRequests>() {
    let h = H::open().await;
    let jobs =
        [begun(&h, wish(&h, "a")).await, begun(&h, wish(&h, "b")).await, begun(&h, wish(&h, "c")).await];
    reported(&h, vec![done(&jobs[0]), rejected(&jobs[1]), broken(&jobs[2])]).await;
    begun(&h, wish(&h, "d")).await;
    accepted(&h, vec![wish(&h, "e"), Submit { needs_broker: true, ..wish(&h, "f") }]).await;
    died(&h, vec![wish(&h, "g"), wish(&h, "h")]).await;
    let rollout = Rollout {
        processing_enabled: false,
        reconciler_enabled: true,
        canary: Percent::new(7).expect("a percentage"),
    };
    switched(&h, rollout_change(rollout)).await;
    let read = async |h: &H| {
        let listed = h.requests().list_requests(&tenant(TENANT), None, None, 100).await;
        let pending = h.requests().pending_requests(Duration::ZERO, 10).await;
        let rollout = h.requests().rollout().await;
        (
            listed.expect("list_requests must succeed"),
            dead(h, None, 10).await,
            pending.expect("pending_requests must succeed"),
            rollout.expect("rollout must succeed"),
            h.requests().job_downstreams().await.expect("job_downstreams must succeed"),
            books(h).await,
        )
    };
    let before = read(&h).await;
    assert_eq!((before.0.requests.len(), before.1.len(), before.2.len(), before.3), (8, 2, 1, Some(rollout)));
    let h = h.reopen().await;
    assert_eq!(read(&h).await, before);
}

pub async fn keys_and_windows_survive<H: HasRequests>() {
    let h = H::open().await;
    let sent = wish(&h, "k");
    assert_eq!(letters(&submitted(&h, vec![sent.clone(), wish(&h, "l")], limits(3, 1)).await), "AA");
    let h = h.reopen().await;
    let batch = vec![again(&h, &sent), wish_for(&h, TENANT, "l", "else"), wish(&h, "m"), wish(&h, "n")];
    assert_eq!(letters(&submitted(&h, batch, limits(3, 1)).await), "RCAL", "what was spent stays spent");
}

pub async fn leases_survive_and_so_do_their_holders<H: HasRequests>() {
    let h = H::open().await;
    let [held, lost] = [begun(&h, wish(&h, "a")).await, begun(&h, wish(&h, "b")).await];
    let h = h.reopen().await;
    assert_eq!(reported_one(&h, done(&held)).await, Ok(Status::Completed), "a worker elsewhere goes on");
    h.clock().advance(policy().lease - TICK);
    nothing_due(&h, "a restart ends no lease").await;
    assert_eq!(claimed(&h, 1).await.next, Some(TICK));
    h.clock().advance(TICK);
    let h = h.reopen().await;
    let holder = claim_one(&h).await;
    assert_eq!((holder.id, holder.attempt), (lost.id, 2));
    let h = h.reopen().await;
    assert_eq!(reported_one(&h, done(&lost)).await, Err(Refused::LeaseLost), "late is late");
    assert_eq!(reported_one(&h, done(&holder)).await, Ok(Status::Completed));
}

pub async fn waits_survive_with_their_time<H: HasRequests>() {
    let h = H::open().await;
    let [retried, waiting] = [begun(&h, wish(&h, "a")).await, begun(&h, wish(&h, "b")).await];
    reported(&h, vec![broken(&retried), taken_over(&waiting)]).await;
    let h = h.reopen().await;
    assert_eq!(claimed(&h, 1).await.next, Some(Duration::from_secs(1)));
    h.clock().advance(Duration::from_secs(1));
    let job = claim_one(&h).await;
    assert_eq!((job.id, job.attempt), (retried.id, 2));
    reported_one(&h, done(&job)).await.expect("it is taken");
    let h = h.reopen().await;
    let left = policy().callback_within - Duration::from_secs(1);
    assert_eq!(claimed(&h, 1).await.next, Some(left));
}

pub async fn tokens_grow_over_restarts_and_replays<H: HasRequests>() {
    let h = H::open().await;
    let late = died(&h, vec![wish(&h, "k")]).await.remove(0);
    let h = h.reopen().await;
    assert!(h.requests().replay_request(late.id).await.expect("replay_request must succeed"));
    let h = h.reopen().await;
    let job = claim_one(&h).await;
    assert!(job.token > late.token);
    assert_eq!(reported_one(&h, done(&late)).await, Err(Refused::LeaseLost));
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    assert_eq!(found(&h, job.id).await.attempts, 1);
}

pub async fn webhooks_survive<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, Submit { callback_url: Some(URL.to_owned()), ..wish(&h, "k") }).await;
    reported_one(&h, done(&job)).await.expect("it is taken");
    let h = h.reopen().await;
    assert_eq!(found(&h, job.id).await.callback_url.as_deref(), Some(URL));
    assert_eq!(webhooks(&h).await, [job.id]);
    let h = h.reopen().await;
    assert_eq!(webhooks(&h).await, []);
}
