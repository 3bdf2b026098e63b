//! The plan for a batch of submissions, given the entries of their idempotency keys and their tenants' windows.

use std::collections::{HashMap, HashSet};

use weir_core::quota::Quota;
use weir_core::request::idempotency::{IdempotencyRecord, SubmissionDecision, decide};
use weir_core::request::state::RequestProgress;
use weir_core::{Timestamp, Verdict};

use super::{Submit, SubmitOutcome, SubmitReceipt, TenantWindow};

/// The entry of an idempotency key: what was submitted under it, and the present status of that request. A key whose
/// request was purged has no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdempotencyEntry {
    pub record: IdempotencyRecord,
    pub receipt: SubmitReceipt,
}

impl IdempotencyEntry {
    /// Returns the outcome of a submission under this key, or `None` if the key has expired and can be used again.
    #[must_use]
    pub fn answer(&self, submit: &Submit, now: Timestamp) -> Option<SubmitOutcome> {
        // A record from before keys were hashed has the plain fingerprint.
        let plain = submit.plain.as_ref().map(|plain| plain.fingerprint);
        let fingerprint =
            plain.filter(|plain| *plain == self.record.fingerprint).unwrap_or(submit.fingerprint);
        match decide(Some(&self.record), &fingerprint, now) {
            SubmissionDecision::New => None,
            SubmissionDecision::Replay(_) => Some(SubmitOutcome::Replayed(self.receipt)),
            SubmissionDecision::Conflict => Some(SubmitOutcome::Conflict),
        }
    }
}

/// Entries by tenant and idempotency key.
pub type IdempotencyEntries<'a> = HashMap<(&'a str, &'a str), IdempotencyEntry>;

/// An accepted submission: the rows to insert.
#[derive(Clone, Copy, Debug)]
pub struct NewRequest<'a> {
    pub submit: &'a Submit,
    pub progress: RequestProgress,
    pub record: IdempotencyRecord,
}

impl<'a> NewRequest<'a> {
    #[must_use]
    pub fn accept(submit: &'a Submit, now: Timestamp) -> Self {
        let mut progress = RequestProgress::accepted(now);
        if submit.needs_broker {
            progress.enqueue_pending().expect("what was just accepted can wait for the broker");
        }
        Self { submit, progress, record: IdempotencyRecord::new(submit.fingerprint, submit.id, now) }
    }

    #[must_use]
    pub fn receipt(&self) -> SubmitReceipt {
        let Self { submit, progress, .. } = self;
        SubmitReceipt { id: submit.id, status: progress.status, accepted_at: progress.due, window: None }
    }
}

#[derive(Debug, Default)]
pub struct SubmitPlan<'a> {
    pub outcomes: Vec<SubmitOutcome>,
    /// The accepted submissions, in order.
    pub accepted: Vec<NewRequest<'a>>,
    /// The windows to save, by tenant.
    pub windows: Vec<(&'a str, Quota)>,
}

/// Decides submissions in order. `keys` has the entries of their idempotency keys, `windows` the windows of tenants with
/// limits, if there are any. Both are updated, so that a batch can be planned in parts.
#[must_use]
pub fn plan_submit<'a>(
    batch: impl IntoIterator<Item = &'a Submit>,
    keys: &mut IdempotencyEntries<'a>,
    windows: &mut HashMap<&'a str, Quota>,
    now: Timestamp,
) -> SubmitPlan<'a> {
    let mut plan = SubmitPlan::default();
    let mut changed = HashSet::new();
    // Windows that began before the clock was set back are corrected and saved, whatever is decided.
    for (tenant, window) in windows.iter_mut() {
        if window.clamp_window_start(now) {
            changed.insert(*tenant);
        }
    }
    for submit in batch {
        let (tenant, name) = (submit.tenant.as_str(), (submit.tenant.as_str(), submit.key.as_str()));
        // The limits may differ from those of the submission before: an operator has changed them.
        let mut window = submit.limits.and_then(|limits| {
            let window = windows.get_mut(tenant)?;
            window.limits = limits;
            Some(window)
        });
        if let Some(answer) = keys.get(&name).and_then(|known| known.answer(submit, now)) {
            let left = window.map(|window| TenantWindow::at(window, now));
            plan.outcomes.push(answer.with_window(left));
            continue;
        }
        if let Some(window) = &mut window {
            if let Verdict::Denied(denial) = window.send(now) {
                let limits = window.limits;
                plan.outcomes.push(SubmitOutcome::Limited { limits, retry_after: denial.retry_after });
                continue;
            }
            changed.insert(tenant);
        }
        let left = window.map(|window| TenantWindow::at(window, now));
        let new = NewRequest::accept(submit, now);
        keys.insert(name, IdempotencyEntry { record: new.record, receipt: new.receipt() });
        plan.outcomes.push(SubmitOutcome::Accepted(new.receipt()).with_window(left));
        plan.accepted.push(new);
    }
    let is_changed = |(tenant, _): &(&&'a str, &Quota)| changed.contains(*tenant);
    plan.windows = windows.iter().filter(is_changed).map(|(tenant, window)| (*tenant, *window)).collect();
    plan
}
