//! Random histories of workers, callbacks, brokers and operators around one request. The model stores every claim and
//! searches them to find out whose report counts.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::request::retry::{FailureCause, RetryBackoff, RetryDecision, RetryPolicy};
use weir_core::request::state::{
    Callback, ClaimOutcome, RequestEvent, RequestProgress, RequestStatus, TransitionError, WorkerReport,
};

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);
const LEASE: Duration = Duration::from_secs(30);

const EVENTS: [RequestEvent; 9] = [
    RequestEvent::EnqueuePending,
    RequestEvent::Enqueued,
    RequestEvent::Claimed,
    RequestEvent::Deferred,
    RequestEvent::Completed,
    RequestEvent::Rejected,
    RequestEvent::Exhausted,
    RequestEvent::Cancelled,
    RequestEvent::Replayed,
];

fn policy(max_attempts: u32) -> RetryPolicy {
    RetryPolicy {
        max_attempts: NonZeroU32::new(max_attempts).unwrap(),
        lease: LEASE,
        ..RetryPolicy::default()
    }
}

fn at(seconds: u64) -> Timestamp {
    START.plus(Duration::from_secs(seconds))
}

const fn retry_later() -> WorkerReport {
    WorkerReport::Called(RetryDecision::Retry { cause: FailureCause::TimedOut, retry_after: None })
}

fn claim(progress: &mut RequestProgress, now: Timestamp) -> u64 {
    match progress.claim(&policy(5), now) {
        Ok(ClaimOutcome::Granted(lease)) => lease.token,
        other => panic!("{other:?}"),
    }
}

fn report(
    progress: &mut RequestProgress,
    token: u64,
    report: WorkerReport,
    now: Timestamp,
) -> Result<RequestStatus, TransitionError> {
    progress.report(token, report, &policy(5), now, 0)
}

#[test]
fn the_listed_transitions_are_the_only_ones() {
    let allowed = [
        ("ACCEPTED", RequestEvent::EnqueuePending, "PENDING_ENQUEUE"),
        ("ACCEPTED", RequestEvent::Claimed, "IN_PROGRESS"),
        ("ACCEPTED", RequestEvent::Cancelled, "CANCELLED"),
        ("PENDING_ENQUEUE", RequestEvent::Cancelled, "CANCELLED"),
        ("IN_PROGRESS", RequestEvent::Cancelled, "CANCELLED"),
        ("PENDING_ENQUEUE", RequestEvent::Enqueued, "ACCEPTED"),
        ("PENDING_ENQUEUE", RequestEvent::Claimed, "IN_PROGRESS"),
        ("IN_PROGRESS", RequestEvent::Claimed, "IN_PROGRESS"),
        ("IN_PROGRESS", RequestEvent::Deferred, "IN_PROGRESS"),
        ("IN_PROGRESS", RequestEvent::Completed, "COMPLETED"),
        ("IN_PROGRESS", RequestEvent::Rejected, "FAILED_PERMANENT"),
        ("IN_PROGRESS", RequestEvent::Exhausted, "FAILED_RETRY_EXHAUSTED"),
        ("FAILED_RETRY_EXHAUSTED", RequestEvent::Replayed, "ACCEPTED"),
    ];
    for status in RequestStatus::ALL {
        assert_eq!(RequestStatus::parse(status.as_str()), Some(status));
        for event in EVENTS {
            let expected = allowed.iter().find(|(from, what, _)| *from == status.as_str() && *what == event);
            assert_eq!(
                status.after(event).map(RequestStatus::as_str),
                expected.map(|(.., to)| *to),
                "{status:?} {event:?}"
            );
        }
    }
    assert_eq!(RequestStatus::parse("accepted"), None);
}

#[test]
fn a_request_is_claimed_called_and_done() {
    let mut progress = RequestProgress::accepted(START);
    let token = claim(&mut progress, START);
    assert_eq!((progress.status, progress.attempts), (RequestStatus::InProgress, 1));
    assert_eq!(progress.claim(&policy(5), at(29)), Err(TransitionError::Leased { until: at(30) }));
    assert_eq!(
        report(&mut progress, token, WorkerReport::Called(RetryDecision::Complete), at(1)),
        Ok(RequestStatus::Completed)
    );
    assert_eq!(progress.lease, None);
    assert_eq!(
        report(&mut progress, token, retry_later(), at(2)),
        Err(TransitionError::Final(RequestStatus::Completed))
    );
    assert_eq!(progress.claim(&policy(5), at(99)), Err(TransitionError::Final(RequestStatus::Completed)));
}

#[test]
fn a_late_worker_changes_nothing_once_another_has_taken_over() {
    let mut progress = RequestProgress::accepted(START);
    let late = claim(&mut progress, START);
    let present = claim(&mut progress, at(30));
    let before = progress;
    for late_report in [
        WorkerReport::Called(RetryDecision::Complete),
        retry_later(),
        WorkerReport::NotCalled { after: Duration::ZERO },
    ] {
        assert_eq!(report(&mut progress, late, late_report, at(31)), Err(TransitionError::LeaseLost));
    }
    assert_eq!(progress, before);
    assert_eq!(
        report(&mut progress, present, WorkerReport::Called(RetryDecision::Complete), at(32)),
        Ok(RequestStatus::Completed)
    );
}

#[test]
fn a_late_report_counts_if_no_one_has_claimed_since() {
    let mut progress = RequestProgress::accepted(START);
    let token = claim(&mut progress, START);
    assert_eq!(
        report(&mut progress, token, WorkerReport::Called(RetryDecision::Complete), at(900)),
        Ok(RequestStatus::Completed)
    );
}

#[test]
fn the_fifth_failure_makes_a_dead_letter_and_a_replay_starts_again() {
    let mut progress = RequestProgress::accepted(START);
    let mut statuses = Vec::new();
    for _ in 0..5 {
        let now = progress.due;
        let token = claim(&mut progress, now);
        statuses.push(report(&mut progress, token, retry_later(), now).unwrap());
        assert!(progress.status.is_final() || progress.due > now);
    }
    assert_eq!(statuses[..4], [RequestStatus::InProgress; 4]);
    assert_eq!(statuses[4], RequestStatus::FailedRetryExhausted);
    progress.replay(at(100)).unwrap();
    assert_eq!((progress.status, progress.attempts, progress.due), (RequestStatus::Accepted, 0, at(100)));
    assert_eq!(claim(&mut progress, at(100)), 6, "tokens continue to grow after a replay");
    assert_eq!(progress.replay(at(101)), Err(TransitionError::Impossible(RequestStatus::InProgress)));
}

#[test]
fn workers_that_vanish_use_up_the_attempts() {
    let mut progress = RequestProgress::accepted(START);
    for attempt in 0..5 {
        claim(&mut progress, at(30 * attempt));
    }
    assert_eq!(progress.claim(&policy(5), at(150)), Ok(ClaimOutcome::Exhausted(FailureCause::WorkerLost)));
    assert_eq!((progress.status, progress.attempts), (RequestStatus::FailedRetryExhausted, 5));
}

#[test]
fn a_call_that_was_not_made_does_not_count_as_an_attempt() {
    let mut progress = RequestProgress::accepted(START);
    for n in 0..20 {
        let token = claim(&mut progress, at(n * 10));
        let (until, after) = (at(n * 10 + 10), Duration::from_secs(10));
        assert_eq!(
            report(&mut progress, token, WorkerReport::NotCalled { after }, at(n * 10)),
            Ok(RequestStatus::InProgress)
        );
        assert_eq!(progress.attempts, 0);
        assert_eq!(progress.claim(&policy(5), at(n * 10 + 9)), Err(TransitionError::NotDue { due: until }));
    }
}

#[test]
fn a_callback_ends_the_wait_even_before_the_report() {
    let mut waiting = RequestProgress::accepted(START);
    let token = claim(&mut waiting, START);
    assert_eq!(
        waiting.clone().call_back(Callback::Completed),
        Ok(RequestStatus::Completed),
        "before the 202 is reported"
    );
    report(&mut waiting, token, WorkerReport::Called(RetryDecision::AwaitCallback), at(1)).unwrap();
    assert_eq!(waiting.claim(&policy(5), at(86_400)), Err(TransitionError::NotDue { due: at(86_401) }));
    let mut failed = waiting;
    assert_eq!(failed.call_back(Callback::Failed), Ok(RequestStatus::FailedPermanent));
    assert_eq!(
        failed.call_back(Callback::Completed),
        Err(TransitionError::Final(RequestStatus::FailedPermanent))
    );
    let mut early = RequestProgress::accepted(START);
    assert_eq!(
        early.call_back(Callback::Completed),
        Err(TransitionError::Impossible(RequestStatus::Accepted))
    );
}

#[test]
fn a_cancelled_request_is_final_whoever_is_at_it() {
    let mut waiting = RequestProgress::accepted(START);
    let mut pending = waiting;
    pending.enqueue_pending().unwrap();
    let mut called = waiting;
    let token = claim(&mut called, START);
    for progress in [&mut waiting, &mut pending, &mut called] {
        progress.cancel().unwrap();
        let cancelled = *progress;
        let is_final = Err(TransitionError::Final(RequestStatus::Cancelled));
        assert_eq!((cancelled.status, cancelled.lease), (RequestStatus::Cancelled, None));
        for late in [WorkerReport::Called(RetryDecision::Complete), retry_later()] {
            assert_eq!(report(progress, token, late, at(1)), is_final);
        }
        assert_eq!(progress.call_back(Callback::Completed), is_final);
        assert_eq!(progress.claim(&policy(5), at(99)).map(drop), is_final.map(drop));
        assert_eq!(progress.replay(at(99)), is_final.map(drop));
        assert_eq!(progress.enqueued(), is_final.map(drop));
        assert_eq!(progress.cancel(), is_final.map(drop));
        assert_eq!(*progress, cancelled);
    }
}

#[test]
fn a_missing_callback_is_retried_until_no_attempt_is_left() {
    let mut progress = RequestProgress::accepted(START);
    for _ in 0..5 {
        let now = progress.due;
        let token = claim(&mut progress, now);
        report(&mut progress, token, WorkerReport::Called(RetryDecision::AwaitCallback), now).unwrap();
    }
    let now = progress.due;
    assert_eq!(progress.claim(&policy(5), now), Ok(ClaimOutcome::Exhausted(FailureCause::CallbackMissing)));
}

#[test]
fn a_job_that_the_broker_may_have_can_be_claimed_while_it_is_pending() {
    let mut progress = RequestProgress::accepted(START);
    progress.enqueue_pending().unwrap();
    assert_eq!(progress.status, RequestStatus::PendingEnqueue);
    let mut published = progress;
    published.enqueued().unwrap();
    assert_eq!(published.status, RequestStatus::Accepted);
    let token = claim(&mut progress, START);
    assert_eq!(progress.enqueued(), Err(TransitionError::Impossible(RequestStatus::InProgress)));
    assert_eq!(progress.lease.map(|lease| lease.token), Some(token), "a refused transition changes nothing");
}

/// One event of a history. A report refers to the claims in reverse order.
#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Claim,
    Report(usize, WorkerReport),
    CallBack(Callback),
    EnqueuePending,
    Enqueued,
    Replay,
    Cancel,
}

fn step() -> impl Strategy<Value = Step> {
    let decision = prop_oneof![
        Just(RetryDecision::Complete),
        Just(RetryDecision::AwaitCallback),
        Just(RetryDecision::Fail(FailureCause::Rejected(400))),
        Just(RetryDecision::Retry { cause: FailureCause::ServerError(503), retry_after: None }),
        Just(RetryDecision::Retry {
            cause: FailureCause::ServerError(503),
            retry_after: Some(Duration::from_secs(7))
        }),
    ];
    let report = prop_oneof![
        4 => decision.prop_map(WorkerReport::Called),
        1 => (0_u64..40).prop_map(|s| WorkerReport::NotCalled { after: Duration::from_secs(s) }),
    ];
    prop_oneof![
        4 => prop_oneof![Just(0), Just(1), Just(29), Just(30), Just(31), Just(86_400)].prop_map(Step::Wait),
        6 => Just(Step::Claim),
        6 => (0_usize..4, report).prop_map(|(back, report)| Step::Report(back, report)),
        1 => prop_oneof![Just(Callback::Completed), Just(Callback::Failed)].prop_map(Step::CallBack),
        1 => Just(Step::EnqueuePending),
        1 => Just(Step::Enqueued),
        1 => Just(Step::Replay),
        1 => prop::bool::weighted(0.2).prop_map(|cancel| if cancel { Step::Cancel } else { Step::Claim }),
    ]
}

/// All claims in order, and whether the request has ended.
#[derive(Default)]
struct Model {
    claims: Vec<ClaimRecord>,
    ends: usize,
    is_over: bool,
}

struct ClaimRecord {
    token: u64,
    at: Timestamp,
    /// Reported, superseded by another claim, or ended by a callback.
    is_closed: bool,
    /// Whether it counts as an attempt since the last replay.
    counts: bool,
}

impl Model {
    fn attempts(&self) -> usize {
        self.claims.iter().filter(|claim| claim.counts).count()
    }

    fn close_all(&mut self) {
        self.claims.iter_mut().for_each(|claim| claim.is_closed = true);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn histories_match_the_model(max in 1_u32..6, steps in prop::collection::vec(step(), 1..80)) {
        let policy = policy(max);
        let (mut progress, mut model, mut now) = (RequestProgress::accepted(START), Model::default(), START);
        for step in steps {
            let before = progress;
            let was_refused = match step {
                Step::Wait(seconds) => {
                    now = now.plus(Duration::from_secs(seconds));
                    false
                }
                Step::Claim => match progress.claim(&policy, now) {
                    Ok(ClaimOutcome::Granted(lease)) => {
                        prop_assert!(!model.is_over);
                        let open = model.claims.iter().find(|claim| !claim.is_closed);
                        prop_assert!(open.is_none_or(|claim| now >= claim.at.plus(LEASE)), "two workers at once");
                        prop_assert!(model.claims.iter().all(|claim| claim.token < lease.token));
                        model.close_all();
                        model.claims.push(ClaimRecord { token: lease.token, at: now, is_closed: false, counts: true });
                        false
                    }
                    Ok(ClaimOutcome::Exhausted(_)) => {
                        prop_assert_eq!(model.attempts(), max as usize);
                        model.close_all();
                        model.is_over = true;
                        false
                    }
                    Err(_) => true,
                },
                Step::Report(back, report) => {
                    let Some(claim) = model.claims.iter_mut().rev().nth(back) else { continue };
                    let result = progress.report(claim.token, report, &policy, now, 1 << 63);
                    prop_assert_eq!(result.is_ok(), !claim.is_closed, "only the current holder may report, and once");
                    if result.is_ok() {
                        claim.is_closed = true;
                        claim.counts = matches!(report, WorkerReport::Called(_));
                        model.is_over = progress.status.is_final();
                        model.ends += usize::from(model.is_over);
                    }
                    result.is_err()
                }
                Step::CallBack(callback) => {
                    let result = progress.call_back(callback);
                    prop_assert_eq!(result.is_ok(), before.status == RequestStatus::InProgress);
                    if result.is_ok() {
                        model.close_all();
                        model.is_over = true;
                        model.ends += 1;
                    }
                    result.is_err()
                }
                Step::Cancel => {
                    let result = progress.cancel();
                    prop_assert_eq!(result.is_ok(), !before.status.is_final());
                    if result.is_ok() {
                        model.close_all();
                        model.is_over = true;
                        model.ends += 1;
                    }
                    result.is_err()
                }
                Step::EnqueuePending => progress.enqueue_pending().is_err(),
                Step::Enqueued => progress.enqueued().is_err(),
                Step::Replay => {
                    let result = progress.replay(now);
                    prop_assert_eq!(result.is_ok(), before.status == RequestStatus::FailedRetryExhausted);
                    if result.is_ok() {
                        model.claims.iter_mut().for_each(|claim| claim.counts = false);
                        (model.is_over, model.ends) = (false, 0);
                    }
                    result.is_err()
                }
            };
            prop_assert!(!was_refused || progress == before, "a refused transition changed something");
            let was_replayed = before.status == RequestStatus::FailedRetryExhausted && progress.status == RequestStatus::Accepted;
            prop_assert!(!before.status.is_final() || progress == before || was_replayed, "a final state changed");
            prop_assert_eq!(progress.status.is_final(), model.is_over);
            prop_assert!(model.ends <= 1, "completed twice");
            prop_assert_eq!(progress.attempts as usize, model.attempts());
            prop_assert!(progress.attempts <= max);
            let open = model.claims.iter().find(|claim| !claim.is_closed).map(|claim| claim.token);
            prop_assert_eq!(progress.lease.map(|lease| lease.token), open);
        }
    }

    /// A request that workers keep claiming ends, whatever the downstream does.
    #[test]
    fn every_request_ends(max in 1_u32..6, reports in prop::collection::vec(0_u8..3, 6), random in any::<u64>()) {
        let policy = RetryPolicy { backoff: RetryBackoff::DEFAULT, ..policy(max) };
        let mut progress = RequestProgress::accepted(START);
        for report in reports {
            let now = progress.lease.map_or(progress.due, |lease| lease.until);
            let Ok(ClaimOutcome::Granted(lease)) = progress.claim(&policy, now) else { break };
            match report {
                0 => drop(progress.report(lease.token, retry_later(), &policy, now, random)),
                1 => drop(progress.report(lease.token, WorkerReport::Called(RetryDecision::AwaitCallback), &policy, now, random)),
                _vanished => {}
            }
        }
        prop_assert_eq!(progress.status, RequestStatus::FailedRetryExhausted);
        prop_assert_eq!(progress.attempts, max);
    }
}
