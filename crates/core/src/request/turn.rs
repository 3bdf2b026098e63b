//! Turns of tenants: who is served when more jobs are due than can be claimed.
//!
//! The tenants with waiting jobs stand in a circle, in the order of their names. In its turn a tenant gets as many jobs as its
//! weight says, then it is the next one's turn. A turn that is cut short because a claim is full is continued by the next claim.
//! So between two turns of a tenant no other gets more than its weight, however many jobs it has waiting, and all that has to be
//! remembered is a place in the circle. Nothing is stored for it: a server that starts begins anywhere.
//!
//! A tenant with few unfinished jobs need not wait for its turn: see [`is_express`].

use std::num::NonZeroU32;

/// How many unfinished jobs a tenant may have for its next job to be an express job.
pub const EXPRESS_JOBS: usize = 8;

/// Whether the next job of a tenant, which has this many unfinished jobs that are not parked, may be claimed out of turn. Such jobs
/// are few for each tenant, so they delay nobody for long, and a tenant that hardly has any work is served at once.
#[must_use]
pub const fn is_express(unfinished: usize) -> bool {
    unfinished < EXPRESS_JOBS
}

/// A place in the circle of tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The tenant that had the last turn. The next one is that of the first tenant behind this name; behind the last name it is the
    /// first one's.
    pub after: String,
    /// If that turn was cut short: how many jobs the tenant has had in it. Then it comes first. Otherwise 0.
    pub had: u32,
}

/// A tenant with due jobs.
#[derive(Clone, Copy, Debug)]
pub struct TurnCandidate<'a> {
    pub tenant: &'a str,
    /// How many jobs it gets in its turn.
    pub weight: NonZeroU32,
    /// How many jobs it may get at the most.
    pub most: usize,
}

/// What one claim gives to each tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnPlan {
    /// In the order of the candidates.
    pub jobs: Vec<usize>,
    /// Where the next claim goes on.
    pub next: Turn,
}

/// Gives `room` jobs to the candidates, which must stand in the order of their turns, a tenant whose turn was cut short first.
/// `is_circle` says that they are all tenants of the circle: then the first one's turn follows the last one's.
#[must_use]
pub fn plan_turns(turn: &Turn, candidates: &[TurnCandidate<'_>], is_circle: bool, room: usize) -> TurnPlan {
    let mut jobs = vec![0_usize; candidates.len()];
    let mut open: Vec<_> =
        candidates.iter().zip(&mut jobs).filter(|(candidate, _)| candidate.most > 0).collect();
    let (mut next, mut left) = (turn.clone(), room);
    while left > 0 && !open.is_empty() {
        open.retain_mut(|(TurnCandidate { tenant, weight, most }, jobs)| {
            if left == 0 {
                return true;
            }
            let had = if next.after == *tenant { next.had } else { 0 };
            let of_turn = weight.get().saturating_sub(had);
            let got = (of_turn as usize).min(most.saturating_sub(**jobs)).min(left);
            **jobs = jobs.saturating_add(got);
            left = left.saturating_sub(got);
            let (is_open, got) = (**jobs < *most, u32::try_from(got).unwrap_or(of_turn));
            let is_cut_short = is_open && got < of_turn;
            let had = if is_cut_short { had.saturating_add(got) } else { 0 };
            next = Turn { after: (*tenant).to_owned(), had };
            is_open
        });
        if !is_circle {
            break;
        }
    }
    TurnPlan { jobs, next }
}
