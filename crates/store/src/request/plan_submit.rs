//! What becomes of submissions, given what their keys stand for and what their tenants have sent.

use std::collections::{HashMap, HashSet};

use weir_core::quota::Quota;
use weir_core::request::idempotency::{IdempotencyRecord, Submission, decide};
use weir_core::request::state::RequestProgress;
use weir_core::{Timestamp, Verdict};

use super::{Submit, SubmitOutcome, SubmitReceipt};

/// What a key stands for: what was submitted under it, and how that request stands. A key whose request was purged stands
/// for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdempotencyEntry {
    /// What was submitted.
    pub record: IdempotencyRecord,
    /// How its request stands.
    pub receipt: SubmitReceipt,
}

impl IdempotencyEntry {
    /// The answer to a submission under this key; `None` when the key has expired, and is free again.
    #[must_use]
    pub fn answer(&self, submit: &Submit, now: Timestamp) -> Option<SubmitOutcome> {
        match decide(Some(&self.record), &submit.fingerprint, now) {
            Submission::New => None,
            Submission::Replay(_) => Some(SubmitOutcome::Replayed(self.receipt)),
            Submission::Conflict => Some(SubmitOutcome::Conflict),
        }
    }
}

/// What keys stand for, by tenant and key.
pub type IdempotencyEntries<'a> = HashMap<(&'a str, &'a str), IdempotencyEntry>;

/// A submission that becomes a request: the rows to be written.
#[derive(Clone, Copy, Debug)]
pub struct NewRequest<'a> {
    /// The submission.
    pub submit: &'a Submit,
    /// The progress of its job.
    pub progress: RequestProgress,
    /// What its key stands for from now on.
    pub record: IdempotencyRecord,
}

impl<'a> NewRequest<'a> {
    /// Accepts a submission.
    #[must_use]
    pub fn accept(submit: &'a Submit, now: Timestamp) -> Self {
        let mut progress = RequestProgress::accepted(now);
        if submit.needs_broker {
            progress.enqueue_pending().expect("what was just accepted can wait for the broker");
        }
        Self { submit, progress, record: IdempotencyRecord::new(submit.fingerprint, submit.id, now) }
    }

    /// What the submitter is told.
    #[must_use]
    pub fn receipt(&self) -> SubmitReceipt {
        SubmitReceipt { id: self.submit.id, status: self.progress.status, accepted_at: self.progress.due }
    }
}

/// What a batch of submissions comes to.
#[derive(Debug, Default)]
pub struct SubmitPlan<'a> {
    /// In the order of the submissions.
    pub outcomes: Vec<SubmitOutcome>,
    /// Those that were accepted, in the same order.
    pub accepted: Vec<NewRequest<'a>>,
    /// The windows that are to be saved, by tenant.
    pub windows: Vec<(&'a str, Quota)>,
}

/// Takes submissions in order. `keys` is what their keys stand for, `windows` what each of their tenants has sent, or `None`
/// where tenants have no limit; both are brought up to date, for a batch that is planned in parts.
#[must_use]
pub fn plan_submit<'a>(
    batch: impl IntoIterator<Item = &'a Submit>,
    keys: &mut IdempotencyEntries<'a>,
    mut windows: Option<&mut HashMap<&'a str, Quota>>,
    now: Timestamp,
) -> SubmitPlan<'a> {
    let mut plan = SubmitPlan::default();
    let mut changed = HashSet::new();
    // The clock has stepped back since these began: they are saved whatever is decided.
    for (tenant, window) in windows.iter_mut().flat_map(|windows| windows.iter_mut()) {
        if window.clamp_window_start(now) {
            changed.insert(*tenant);
        }
    }
    for submit in batch {
        let (tenant, name) = (submit.tenant.as_str(), (submit.tenant.as_str(), submit.key.as_str()));
        if let Some(answer) = keys.get(&name).and_then(|known| known.answer(submit, now)) {
            plan.outcomes.push(answer);
            continue;
        }
        if let Some(window) = windows.as_mut().and_then(|windows| windows.get_mut(tenant)) {
            if let Verdict::Denied(denial) = window.send(now) {
                let limits = window.limits;
                plan.outcomes.push(SubmitOutcome::Limited { limits, retry_after: denial.retry_after });
                continue;
            }
            changed.insert(tenant);
        }
        let new = NewRequest::accept(submit, now);
        keys.insert(name, IdempotencyEntry { record: new.record, receipt: new.receipt() });
        plan.outcomes.push(SubmitOutcome::Accepted(new.receipt()));
        plan.accepted.push(new);
    }
    let windows = windows.map(|windows| &*windows).into_iter().flatten();
    let is_changed = |(tenant, _): &(&&'a str, &Quota)| changed.contains(*tenant);
    plan.windows = windows.filter(is_changed).map(|(tenant, window)| (*tenant, *window)).collect();
    plan
}
