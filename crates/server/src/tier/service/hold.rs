//! Holds: an estimate is spent first and corrected when the true cost is known.
//!
//! The estimate is spent, then the hold is stored; a crash in between leaves the estimate spent. The caller gets the hold's id
//! once both would survive a crash: settling a hold whose estimate was lost would give back what others have spent. Settling
//! marks the hold, then corrects the spending; a crash in between leaves the estimate spent. So nothing is given back twice.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use weir_core::tier::{Correction, HoldSettlement, LimitState};
use weir_core::{HoldId, Timestamp};
use weir_store::Result;
use weir_store::tier::{NewHold, Policy, SettledHold};

use super::TierService;
use crate::engines::within;
use crate::tier::events::HoldCorrectionFailed;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldOutcome {
    UnknownPolicy,
    /// The estimate does not fit; nothing was spent.
    Denied {
        limit_state: LimitState,
        /// How long until the estimate fits; `None` if it never does.
        retry_after: Option<Duration>,
    },
    /// The estimate is spent, and the hold can be settled.
    Held {
        id: HoldId,
        limit_state: LimitState,
        /// Until when the hold can be settled.
        expires_at: Timestamp,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettleOutcome {
    /// There is no such hold, or it expired more than a day ago.
    Unknown,
    /// The hold had expired; its estimate stays spent.
    Expired,
    /// The hold is settled, by this call or an earlier one.
    Settled {
        policy: String,
        key: String,
        /// The estimate.
        held: u32,
        /// The true cost.
        cost: u32,
    },
}

impl TierService {
    /// Spends an estimate that can be corrected within `ttl`.
    /// Fails when the limit store or the store does not answer; the estimate is then given back if possible.
    pub async fn hold(&self, policy: &str, key: &str, cost: u32, ttl: Duration) -> Result<HoldOutcome> {
        let Some(policy) = self.policy(policy) else { return Ok(HoldOutcome::UnknownPolicy) };
        let (decision, result, now) = self.take_one(&policy, key, cost).await?;
        let mut limit_state = result.limit_state;
        if !result.allowed {
            return Ok(HoldOutcome::Denied { limit_state, retry_after: result.retry_after });
        }
        if !decision.is_allowed() {
            // A shadow policy denies nothing, so the estimate becomes a debt.
            let (spent, now) = self.limits.charge(&policy, key, cost).await?;
            limit_state = policy.spec.limit.limit_state(&spent, now);
        }
        let id = HoldId::new(now, rand::random());
        let hold = NewHold {
            id,
            policy: policy.name.clone(),
            scope: policy.scope(),
            key: key.to_owned(),
            cost,
            taken_at: now,
            ttl,
        };
        let stored = async {
            let (put, ()) = join(self.shared.store.put_hold(hold), self.limits.flush()).await;
            put
        };
        match within(self.shared.timeout, stored).await {
            Ok(expires_at) => Ok(HoldOutcome::Held { id, limit_state, expires_at }),
            Err(error) => {
                // Nobody has the id, so nobody can settle the hold.
                let _ = self.limits.give_back(&policy, key, cost, Some(now)).await;
                Err(error)
            }
        }
    }

    /// Settles a hold at its true cost, once.
    pub async fn settle(&self, id: HoldId, cost: u32) -> Result<SettleOutcome> {
        let shared = Arc::clone(&self.shared);
        // A task of its own: a hold that was marked is also corrected when the caller's timeout has passed.
        let limits = Arc::clone(&self.limits);
        let settle = tokio::spawn(async move {
            let settled = shared.store.settle_hold(id, cost).await?;
            if let Some(settled) = &settled {
                let definitions = shared.definitions.snapshot();
                let policy = definitions.policy(settled.policy.as_str());
                // The scope tells this policy from a later one of the same name.
                if let Some(policy) = policy.filter(|policy| policy.scope() == settled.scope) {
                    correct(&*limits, policy, settled).await;
                }
            }
            Ok(settled)
        });
        let settle =
            async { settle.await.unwrap_or_else(|panic| Err(weir_store::Error::failed("tier", panic))) };
        let Some(settled) = within(self.shared.timeout, settle).await? else {
            return Ok(SettleOutcome::Unknown);
        };
        Ok(match (settled.settlement, settled.hold.settled) {
            (HoldSettlement::Settled(_) | HoldSettlement::AlreadySettled(_), Some(cost)) => {
                SettleOutcome::Settled {
                    policy: settled.policy.to_string(),
                    key: settled.key,
                    held: settled.hold.cost,
                    cost,
                }
            }
            _ => SettleOutcome::Expired,
        })
    }
}

async fn correct(limits: &dyn weir_store::tier::LimitStore, policy: &Arc<Policy>, settled: &SettledHold) {
    let (key, hold) = (settled.key.as_str(), &settled.hold);
    let corrected = match settled.settlement {
        HoldSettlement::Settled(Correction::Charge(more)) => {
            limits.charge(policy, key, more).await.map(|_| ())
        }
        HoldSettlement::Settled(Correction::GiveBack(less)) => {
            limits.give_back(policy, key, less, Some(hold.taken_at)).await.map(|_| ())
        }
        _ => Ok(()),
    };
    if let Err(error) = corrected {
        HoldCorrectionFailed { policy: &policy.name, error: &error }.emit();
    }
}
