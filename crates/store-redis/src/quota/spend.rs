//! One batch of sends on Redis: take places that are reserved, reserve more where there are none, enqueue what got a
//! place. What Redis cannot answer the store decides.

use std::collections::HashMap;

use weir_core::quota::{Grant, QuotaLimits};
use weir_core::verdict::DenialReason;
use weir_core::{Clock, Denial, MessageId, Timestamp, UserId};
use weir_store::Result;
use weir_store::quota::{
    AcceptedMessage, EnqueueOutcome, Reservation, ReservationRequest, SendMessage, SendOutcome,
    UnusedReservation, random_bytes,
};

use super::reply::{HashState, Reply, spent};
use super::write_behind::WriteBehind;
use super::{Parts, key};
use crate::client::{Item, Unanswered};
use crate::script::Script;

/// How often a reservation may come too late, because new limits came first, before the store decides.
const ROUNDS: usize = 3;

/// The sends of one user in a batch.
struct Demand<'a> {
    user: &'a UserId,
    /// Their places in the batch.
    commands: Vec<usize>,
    /// What the first of them got.
    grants: Vec<Granted>,
    /// What becomes of the others.
    rest: Rest,
}

#[derive(Clone, Copy)]
struct Granted {
    limits: QuotaLimits,
    grant: Grant,
    at: Timestamp,
}

#[derive(Clone)]
enum Rest {
    /// Not asked yet, or to be asked again.
    Open,
    /// More places have to be reserved.
    Short {
        nonce: String,
        redis_ms: i64,
    },
    Denied {
        limits: QuotaLimits,
        denial: Denial,
        at: Timestamp,
        redis_ms: i64,
    },
    NotConfigured,
    /// Redis cannot say; the store can.
    Elsewhere,
}

impl Demand<'_> {
    fn unmet(&self) -> u32 {
        u32::try_from(self.commands.len() - self.grants.len()).unwrap_or(u32::MAX)
    }

    fn is_open(&self) -> bool {
        self.unmet() > 0 && matches!(self.rest, Rest::Open)
    }

    fn is_short(&self) -> bool {
        self.unmet() > 0 && matches!(self.rest, Rest::Short { .. })
    }

    /// What `quota_spend` said. It never denies: whether a window is full is the store's to say.
    fn spend(&mut self, reply: Option<Reply>, clock: Option<&dyn Clock>) {
        self.take(reply, clock);
        if let Rest::Denied { redis_ms, .. } = self.rest {
            self.rest = Rest::Short { nonce: String::new(), redis_ms };
        }
    }

    fn take(&mut self, reply: Option<Reply>, clock: Option<&dyn Clock>) {
        self.rest = match reply {
            Some(Reply::Cold { nonce, redis_ms }) => Rest::Short { nonce, redis_ms },
            Some(Reply::Taken(mut hash_state)) => {
                if let Some(clock) = clock {
                    hash_state.left = hash_state.reset_at().since(clock.now());
                }
                self.stand(&hash_state)
            }
            Some(Reply::Refused) => Rest::Open,
            Some(Reply::Outdated) | None => Rest::Elsewhere,
        };
    }

    fn stand(&mut self, hash_state: &HashState) -> Rest {
        let (limits, at) = (hash_state.limits, hash_state.at());
        for nth in 1..=hash_state.taken {
            let count = hash_state.count - hash_state.taken + nth;
            let remaining = limits.rate_limit().saturating_sub(count);
            let grant = Grant { remaining, reset_at: hash_state.reset_at() };
            self.grants.push(Granted { limits, grant, at });
        }
        if hash_state.reserved < limits.rate_limit() {
            return Rest::Short { nonce: String::new(), redis_ms: hash_state.redis_ms };
        }
        let denial = Denial { reason: DenialReason::QuotaExceeded, retry_after: hash_state.left };
        Rest::Denied { limits, denial, at, redis_ms: hash_state.redis_ms }
    }
}

pub(super) async fn send_batch(
    parts: &Parts,
    behind: &WriteBehind,
    batch: Vec<SendMessage>,
) -> Result<Vec<SendOutcome>> {
    let mut demands = group(&batch);
    // Of users whose limits have just changed a hash may say what is no longer so.
    for demand in demands.iter_mut().filter(|demand| parts.invalidations.has(demand.user)) {
        demand.rest = Rest::Elsewhere;
    }
    for _round in 0..ROUNDS {
        spend(parts, &mut demands).await;
        reserve(parts, &mut demands).await?;
        if !demands.iter().any(Demand::is_open) {
            break;
        }
    }
    behind.track(demands.iter().filter(|demand| !demand.grants.is_empty()).map(|demand| demand.user));
    if demands.iter().all(|demand| demand.grants.is_empty() && matches!(demand.rest, Rest::Elsewhere)) {
        drop(demands);
        return parts.store.send_batch(batch.into()).await;
    }
    let mut outcomes = vec![None; batch.len()];
    enqueue(parts, &batch, &demands, &mut outcomes).await?;
    let elsewhere = refuse(&demands, &mut outcomes);
    if !elsewhere.is_empty() {
        let rest: Vec<SendMessage> = elsewhere.iter().map(|&command| batch[command].clone()).collect();
        // Others of the batch have their answers: a store that does not answer fails only its own.
        let unknown = || vec![SendOutcome::NotQueued(EnqueueOutcome::Unknown); elsewhere.len()];
        let decided = parts.store.send_batch(rest.into()).await.unwrap_or_else(|error| {
            tracing::warn!(error = %error.with_causes(), "neither Redis nor the store can decide a send");
            unknown()
        });
        elsewhere.iter().zip(decided).for_each(|(&command, outcome)| outcomes[command] = Some(outcome));
    }
    Ok(outcomes.into_iter().map(|outcome| outcome.expect("every command is decided above")).collect())
}

fn group(batch: &[SendMessage]) -> Vec<Demand<'_>> {
    let mut places: HashMap<&UserId, usize> = HashMap::with_capacity(batch.len());
    let mut demands: Vec<Demand<'_>> = Vec::new();
    for (command, SendMessage { user, .. }) in batch.iter().enumerate() {
        let place = *places.entry(user).or_insert_with(|| {
            demands.push(Demand { user, commands: Vec::new(), grants: Vec::new(), rest: Rest::Open });
            demands.len() - 1
        });
        demands[place].commands.push(command);
    }
    demands
}

/// Takes places that are reserved.
async fn spend(parts: &Parts, demands: &mut [Demand<'_>]) {
    let items: Vec<_> = demands
        .iter()
        .filter(|demand| demand.is_open())
        .map(|demand| Item { key: key(demand.user), arguments: vec![demand.unmet().to_string()] })
        .collect();
    let nonce = format!("{:016x}", fastrand::u64(..));
    let common = [&*parts.epoch(), &parts.now(), &nonce];
    let answers = parts.redis.call(Script::Spend, &common, &items).await;
    let open = demands.iter_mut().filter(|demand| demand.is_open());
    for (demand, answer) in open.zip(answers) {
        demand.spend(answer.ok().as_ref().and_then(spent), parts.clock.as_deref());
    }
}

/// Reserves places where there are too few, for all users at once, and takes those that are needed.
async fn reserve(parts: &Parts, demands: &mut [Demand<'_>]) -> Result<()> {
    let mut short: Vec<_> = demands.iter_mut().filter(|demand| demand.is_short()).collect();
    if short.is_empty() {
        return Ok(());
    }
    let wants = short
        .iter()
        .map(|demand| ReservationRequest { user: demand.user.clone(), units: demand.unmet() })
        .collect();
    let reserved = parts.store.reserve(wants).await?;
    let mut items = Vec::with_capacity(short.len());
    for (demand, reserved) in short.iter_mut().zip(&reserved) {
        match reserved {
            Some(reserved) => items.push(installation(demand, reserved)),
            None => demand.rest = Rest::NotConfigured,
        }
    }
    let answers = parts.redis.call(Script::Install, &[&parts.epoch()], &items).await;
    let mut unused = Vec::new();
    let installed = short.iter_mut().zip(reserved).filter_map(|(demand, reserved)| Some((demand, reserved?)));
    for ((demand, reserved), answer) in installed.zip(answers) {
        let reply = match answer {
            Ok(answer) => spent(&answer),
            Err(Unanswered) => Some(Reply::Taken(own_places(demand, &reserved))),
        };
        if reply == Some(Reply::Refused) && reserved.units > 0 {
            let (user, window) = (demand.user.clone(), reserved.row.last_refresh);
            unused.push(UnusedReservation { user, window, units: reserved.units });
        }
        demand.take(reply, parts.clock.as_deref());
        if demand.is_short() {
            demand.rest = Rest::Open;
        }
    }
    if unused.is_empty() { Ok(()) } else { parts.store.return_unused(unused).await }
}

/// The places that were reserved for these very sends, when Redis does not say whether it has them. If it does, it has
/// handed them out to us; if not, nobody else gets them.
fn own_places(demand: &Demand<'_>, reserved: &Reservation) -> HashState {
    let Reservation { row, units, at } = reserved;
    let taken = demand.unmet().min(*units);
    HashState {
        taken,
        count: row.current_count.saturating_sub(*units).saturating_add(taken),
        reserved: row.current_count,
        limits: row.limits,
        window: row.last_refresh,
        left: row.reset_at().since(*at),
        redis_ms: 0,
    }
}

fn installation(demand: &Demand<'_>, reserved: &Reservation) -> Item {
    let Reservation { row, units, at } = reserved;
    let (nonce, redis_ms) = match &demand.rest {
        Rest::Short { nonce, redis_ms } => (nonce.clone(), *redis_ms),
        _ => Default::default(),
    };
    // Redis was asked before the store: counted from then, the hash never outlives the window.
    let left_ms = i64::try_from(row.reset_at().since(*at).as_millis()).unwrap_or(i64::MAX);
    let arguments = vec![
        nonce,
        row.last_refresh.as_micros().to_string(),
        units.to_string(),
        row.current_count.to_string(),
        row.limits.rate_limit().to_string(),
        row.limits.time_window_minutes().to_string(),
        redis_ms.saturating_add(left_ms).to_string(),
        demand.unmet().to_string(),
    ];
    Item { key: key(demand.user), arguments }
}

/// Enqueues what got a place, in the order of the batch. A place is not given back when that fails: meanwhile somebody
/// else may have been refused for it.
async fn enqueue(
    parts: &Parts,
    batch: &[SendMessage],
    demands: &[Demand<'_>],
    outcomes: &mut [Option<SendOutcome>],
) -> Result<()> {
    let mut granted: Vec<(usize, Granted)> = demands
        .iter()
        .flat_map(|demand| demand.commands.iter().copied().zip(demand.grants.iter().copied()))
        .collect();
    granted.sort_unstable_by_key(|(command, _)| *command);
    let accepted: Vec<_> = granted
        .iter()
        .map(|&(command, Granted { at, .. })| {
            let SendMessage { user, message } = &batch[command];
            AcceptedMessage { message_id: MessageId::new(at, random_bytes()), user, message, at }
        })
        .collect();
    let queued = parts.store.enqueue(&accepted).await?;
    for (((command, Granted { limits, grant, at }), accepted), queued) in
        granted.into_iter().zip(accepted).zip(queued)
    {
        outcomes[command] = Some(match queued {
            EnqueueOutcome::Enqueued => {
                SendOutcome::Accepted { message_id: accepted.message_id, limits, grant, at }
            }
            not => SendOutcome::NotQueued(not),
        });
    }
    Ok(())
}

/// Answers what got no place, and says which commands the store has to decide.
fn refuse(demands: &[Demand<'_>], outcomes: &mut [Option<SendOutcome>]) -> Vec<usize> {
    let mut elsewhere = Vec::new();
    for Demand { commands, grants, rest, .. } in demands {
        for &command in &commands[grants.len()..] {
            match rest {
                Rest::Denied { limits, denial, at, .. } => {
                    outcomes[command] =
                        Some(SendOutcome::Denied { limits: *limits, denial: *denial, at: *at });
                }
                Rest::NotConfigured => outcomes[command] = Some(SendOutcome::NotConfigured),
                Rest::Open | Rest::Short { .. } | Rest::Elsewhere => elsewhere.push(command),
            }
        }
    }
    elsewhere.sort_unstable();
    elsewhere
}
