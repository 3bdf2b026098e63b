//! Holds: an estimate is spent first and corrected when the true cost is known.
//!
//! The estimate is spent, then the hold is remembered; in between, a crash leaves it spent. A hold is told of when both
//! would survive a crash: one whose estimate was forgotten would give back what others have spent. Settling marks the hold,
//! then corrects what was spent; in between, a crash leaves the estimate. So nothing is given back twice.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use weir_core::tier::{Correction, HoldSettlement, LimitState};
use weir_core::{HoldId, Timestamp};
use weir_store::Result;
use weir_store::tier::{NewHold, Policy, SettledHold};

use super::TierService;
use crate::engines::within;

/// What came of asking for a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldOutcome {
    /// There is no such policy.
    UnknownPolicy,
    /// There was no room, and nothing was spent.
    Denied {
        /// Where the key stands.
        limit_state: LimitState,
        /// How long it has to wait; none when it never fits.
        retry_after: Option<Duration>,
    },
    /// It was spent, and can be settled.
    Held {
        /// Its name.
        id: HoldId,
        /// Where the key stands.
        limit_state: LimitState,
        /// Until when it can be settled.
        expires_at: Timestamp,
    },
}

/// What came of settling a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettleOutcome {
    /// There is no such hold, or it expired more than a day ago.
    Unknown,
    /// It had expired and is spent in full.
    Expired,
    /// It is settled, now or since an earlier time: the answer is the same.
    Settled {
        /// What it was taken from.
        policy: String,
        /// The key it was taken for.
        key: String,
        /// What was held.
        held: u32,
        /// What it cost in truth.
        cost: u32,
    },
}

impl TierService {
    /// Spends an estimate, to be corrected within `ttl`.
    /// Fails when the engine of limits or the store does not answer; then nothing stays spent, as far as can be told.
    pub async fn hold(&self, policy: &str, key: &str, cost: u32, ttl: Duration) -> Result<HoldOutcome> {
        let Some(policy) = self.policy(policy) else { return Ok(HoldOutcome::UnknownPolicy) };
        let (alone, answer, now) = self.take_one(&policy, key, cost).await?;
        let mut limit_state = answer.limit_state;
        if !answer.allowed {
            return Ok(HoldOutcome::Denied { limit_state, retry_after: answer.retry_after });
        }
        if !alone.is_allowed() {
            // A policy that only observes: what does not fit is owed.
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
        let remembered = async {
            let (put, ()) = join(self.shared.store.put_hold(hold), self.limits.flush()).await;
            put
        };
        match within(self.shared.timeout, remembered).await {
            Ok(expires_at) => Ok(HoldOutcome::Held { id, limit_state, expires_at }),
            Err(error) => {
                // Nobody was told of it, so nobody can settle it.
                let _ = self.limits.give_back(&policy, key, cost, Some(now)).await;
                Err(error)
            }
        }
    }

    /// Settles a hold at its true cost, once.
    pub async fn settle(&self, id: HoldId, cost: u32) -> Result<SettleOutcome> {
        let shared = Arc::clone(&self.shared);
        // Goes on when it takes too long, so that a hold that was marked is corrected.
        let limits = Arc::clone(&self.limits);
        let settle = tokio::spawn(async move {
            let settled = shared.store.settle_hold(id, cost).await?;
            if let Some(settled) = &settled {
                let definitions = shared.definitions.get();
                let policy = definitions.policy(settled.policy.as_str());
                // One of the same name that was made later has nothing to do with it.
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
    let done = match settled.settlement {
        HoldSettlement::Settled(Correction::Charge(more)) => {
            limits.charge(policy, key, more).await.map(|_| ())
        }
        HoldSettlement::Settled(Correction::GiveBack(less)) => {
            limits.give_back(policy, key, less, Some(hold.taken_at)).await.map(|_| ())
        }
        _ => Ok(()),
    };
    if let Err(error) = done {
        tracing::warn!(error = %error.with_causes(), "a hold was settled, and its estimate stays spent");
    }
}
