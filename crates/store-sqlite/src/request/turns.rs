//! Claims by turns of tenants, and claims of express jobs. The plan decides how many jobs each tenant gets; this file reads the
//! tenants in the order of their turns and claims the jobs, turn by turn of the writer.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::Timestamp;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::turn::EXPRESS_JOBS;
use weir_store::request::{
    CLAIM_BYTES_MAX, ClaimOrder, ClaimedJobs, DownstreamCapacity, Submit, TenantCapacity, TurnClaim,
    TurnGrant, TurnScan,
};

use super::jobs::{self, CLAIM};
use super::limited;
use crate::writer::WriterTurn;

/// Jobs read together. Jobs that are not claimed when the turn ends are read again in the next one.
const READ_CHUNK: usize = 64;
/// Parked jobs that one claim puts back into the circle.
const UNPARKED_MAX: usize = 256;

const UNPARK: &str = "
    UPDATE request_record SET is_parked = 0 WHERE id IN (
        SELECT id FROM request_record WHERE downstream = ?1 AND is_parked = 1 AND claimable_at <= ?2
        ORDER BY claimable_at LIMIT ?3)";
/// The first tenant behind another.
const NEXT_TENANT: &str = "
    SELECT tenant_id FROM request_record
    WHERE downstream = ?1 AND tenant_id > ?2 AND claimable_at IS NOT NULL AND is_parked = 0
    ORDER BY tenant_id LIMIT 1";
const FIRST_OF_TENANT: &str = "
    SELECT claimable_at FROM request_record
    WHERE downstream = ?1 AND tenant_id = ?2 AND claimable_at IS NOT NULL AND is_parked = 0
    ORDER BY claimable_at LIMIT 1";
const COUNT_UNFINISHED: &str = "
    SELECT count(*) FROM (
        SELECT 1 FROM request_record
        WHERE downstream = ?1 AND tenant_id = ?2 AND claimable_at IS NOT NULL AND is_parked = 0 LIMIT ?3)";
/// Behind [`CLAIM`]. With `claimable_at IS NOT NULL`, which the comparison implies, SQLite would take another index.
pub(super) const DUE_OF_TENANT: &str = "
    WHERE downstream = ?1 AND tenant_id = ?2 AND claimable_at <= ?3 AND is_parked = 0
    ORDER BY claimable_at LIMIT ?4";
/// Behind [`CLAIM`]. The last accepted come first.
pub(super) const EXPRESS: &str = "
    WHERE downstream = ?1 AND claimable_at <= ?2 AND is_express = 1 ORDER BY claimable_at DESC LIMIT ?3";
const HAS_EXPRESS: &str = "
    SELECT 1 FROM request_record WHERE downstream = ?1 AND claimable_at <= ?2 AND is_express = 1 LIMIT 1";

/// A claim by turns.
pub(super) struct TurnClaimJob {
    room: Vec<DownstreamCapacity>,
    /// `None` at the end.
    plan: Option<TurnClaim>,
    is_begun: bool,
    /// What is still to be claimed in this pass.
    grants: VecDeque<TurnGrant>,
    policy: RetryPolicy,
    now: Timestamp,
    claimed: ClaimedJobs,
}

impl TurnClaimJob {
    pub(super) fn new(
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: RetryPolicy,
        now: Timestamp,
    ) -> Self {
        let plan = Some(TurnClaim::new(room, order));
        let (grants, claimed) = (VecDeque::new(), ClaimedJobs::default());
        Self { room: room.to_vec(), plan, is_begun: false, grants, policy, now, claimed }
    }

    /// Claims for one turn of the writer. Breaks with all claimed jobs at the end.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<ClaimedJobs>> {
        if !std::mem::replace(&mut self.is_begun, true) {
            self.find(connection)?;
        }
        while let Some(plan) = &mut self.plan {
            let Some(grant) = self.grants.pop_front() else {
                self.grants = plan.grants().into();
                if self.grants.is_empty() {
                    break;
                }
                continue;
            };
            if let Some(rest) = self.claim(connection, grant, turn)? {
                self.grants.push_front(rest);
                return Ok(ControlFlow::Continue(()));
            }
        }
        let mut claimed = std::mem::take(&mut self.claimed);
        if let Some(plan) = self.plan.take() {
            plan.finish(&mut claimed);
        }
        if claimed.jobs.is_empty() && claimed.exhausted.is_empty() {
            // Other workers have claimed the jobs meanwhile, or tenants have as many calls as they may have.
            claimed.next_due_in = jobs::next(connection, &self.room)?.map(|next| next.since(self.now));
        }
        Ok(ControlFlow::Break(claimed))
    }

    /// Reads which tenants have due jobs.
    fn find(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let Some(plan) = &mut self.plan else { return Ok(()) };
        for (index, scan) in plan.scans().into_iter().enumerate() {
            let values = params![scan.downstream, self.now.as_micros(), limited(UNPARKED_MAX)];
            connection.prepare_cached(UNPARK)?.execute(values)?;
            plan.found(index, scan.limit, tenants(connection, &scan, self.now)?);
        }
        Ok(())
    }

    /// Claims what a tenant is granted. Returns what is left of it when the turn has ended.
    fn claim(
        &mut self,
        connection: &Connection,
        grant: TurnGrant,
        turn: &WriterTurn,
    ) -> rusqlite::Result<Option<TurnGrant>> {
        let Self { plan: Some(plan), policy, now, claimed, .. } = self else { return Ok(None) };
        let TurnGrant { downstream, tenant, mut jobs, taken } = grant;
        while jobs > 0 && plan.bytes_left() > 0 {
            let limit = jobs.min(READ_CHUNK);
            let mut statement = connection.prepare_cached(&format!("{CLAIM} {DUE_OF_TENANT}"))?;
            let mut rows = statement.query(params![downstream, tenant, now.as_micros(), limited(limit)])?;
            let due = jobs::read_claims(&mut rows, plan.bytes_left())?;
            let is_last = due.len() < limit;
            for row in due {
                if !turn.has_time() {
                    return Ok(Some(TurnGrant { downstream, tenant, jobs, taken }));
                }
                plan.claimed(&downstream, &tenant, row.1.payload.bytes.len());
                jobs -= 1;
                jobs::claim(connection, row, policy, *now, claimed)?;
            }
            if is_last {
                break;
            }
        }
        Ok(None)
    }
}

/// Reads the tenants of a scan, each with whether it has a due job.
fn tenants(
    connection: &Connection,
    scan: &TurnScan,
    now: Timestamp,
) -> rusqlite::Result<Vec<(String, bool)>> {
    let TurnScan { downstream, after, limit } = scan;
    let (mut next, mut first) =
        (connection.prepare_cached(NEXT_TENANT)?, connection.prepare_cached(FIRST_OF_TENANT)?);
    let (mut tenants, mut place, mut is_wrapped) = (Vec::new(), after.clone(), false);
    while tenants.len() < *limit {
        let mut found: Option<String> = next.query_row([downstream, &place], |row| row.get(0)).optional()?;
        if found.is_none() && !is_wrapped {
            is_wrapped = true;
            found = next.query_row([downstream, ""], |row| row.get(0)).optional()?;
        }
        let Some(tenant) = found.filter(|tenant| !is_wrapped || tenant <= after) else { break };
        let at: i64 = first.query_row([downstream, &tenant], |row| row.get(0))?;
        place.clone_from(&tenant);
        tenants.push((tenant, at <= now.as_micros()));
    }
    Ok(tenants)
}

/// Counts the unfinished jobs of a submission's tenant, up to as many as matter.
pub(super) fn count_unfinished(connection: &Connection, submit: &Submit) -> rusqlite::Result<usize> {
    let values = params![submit.downstream, submit.tenant.as_str(), limited(EXPRESS_JOBS)];
    connection.prepare_cached(COUNT_UNFINISHED)?.query_row(values, |row| row.get(0))
}

/// Whether there are express jobs to claim.
pub(super) fn has_express(
    connection: &Connection,
    room: &[DownstreamCapacity],
    now: Timestamp,
) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare_cached(HAS_EXPRESS)?;
    for room in room.iter().filter(|room| room.jobs > 0) {
        if statement.exists(params![room.downstream, now.as_micros()])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Claims express jobs: few enough for one turn.
pub(super) fn claim_express(
    connection: &Connection,
    room: &[DownstreamCapacity],
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
    now: Timestamp,
) -> rusqlite::Result<ClaimedJobs> {
    let without: HashSet<&str> = tenants.without_express().into_iter().collect();
    let (mut tenants, mut claimed, mut bytes) = (tenants.clone(), ClaimedJobs::default(), 0);
    for DownstreamCapacity { downstream, jobs } in room {
        // Each tenant that gets none may have this many in front of the others.
        let limit = jobs.saturating_add(without.len() * EXPRESS_JOBS);
        let mut statement = connection.prepare_cached(&format!("{CLAIM} {EXPRESS}"))?;
        let mut rows = statement.query(params![downstream, now.as_micros(), limited(limit)])?;
        let mut left = *jobs;
        for row in jobs::read_claims(&mut rows, CLAIM_BYTES_MAX.saturating_sub(bytes))? {
            if left == 0 {
                break;
            }
            bytes += row.1.payload.bytes.len();
            if !without.contains(row.1.tenant.as_str()) && tenants.admit(row.1.tenant.as_str()) {
                left -= 1;
                jobs::claim(connection, row, policy, now, &mut claimed)?;
            }
        }
    }
    Ok(claimed)
}
