//! Decides one batch of sends on Redis: spends reserved units, reserves more in the store where there are too few, and
//! enqueues the accepted sends. The store decides sends for which Redis gives no usable reply.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weir_core::quota::{Grant, QuotaLimits};
use weir_core::verdict::DenialReason;
use weir_core::{Clock, Denial, MessageId, Timestamp, UserId};
use weir_store::quota::{
    AcceptedMessage, EnqueueOutcome, Reservation, ReservationRequest, ReservedUnits, SendMessage,
    SendOutcome, random_bytes,
};
use weir_store::{Error, Result};

use super::reply::{HashState, SpendReply, parse_peek, parse_spend};
use super::write_behind::{Unrecorded, WriteBehind};
use super::{SharedQuota, key};
use crate::client::{KeyCall, NoReply};
use crate::script::Script;

/// How many times a batch reserves again when Redis refuses because the limits have changed, beside the times when it has waited
/// for others. Then the store decides.
const ROUNDS_MAX: usize = 3;
/// The first pause while others install what they have reserved. Each is twice as long as the one before, up to a limit.
pub(super) const INSTALL_PAUSE: Duration = Duration::from_millis(1);
pub(super) const INSTALL_PAUSE_MAX: Duration = Duration::from_millis(50);

/// The sends of one user in a batch.
struct UserSends<'a> {
    user: &'a UserId,
    /// Their indices in the batch.
    commands: Vec<usize>,
    /// The grants of the first commands.
    grants: Vec<SendGrant>,
    /// Granted units that the store does not show as sent yet.
    unrecorded: Unrecorded,
    /// How often units of the window had been given back at the last spend, before the store was asked for more.
    returns: u32,
    /// How the commands without a grant are decided.
    remainder: RemainderState,
}

#[derive(Clone, Copy)]
struct SendGrant {
    limits: QuotaLimits,
    grant: Grant,
    at: Timestamp,
}

#[derive(Clone)]
enum RemainderState {
    /// To be spent in Redis, for the first time or again.
    Undecided,
    /// More units have to be reserved in the store.
    NeedsReservation {
        nonce: String,
        redis_ms: i64,
    },
    Denied {
        limits: QuotaLimits,
        denial: Denial,
        at: Timestamp,
        redis_ms: i64,
    },
    /// The window is full, but another caller may be about to install units of it, or to give some back to the store.
    AwaitingInstalls {
        limits: QuotaLimits,
        denial: Denial,
        at: Timestamp,
    },
    NotConfigured,
    /// The store decides, because Redis cannot.
    LeftToStore,
}

impl UserSends<'_> {
    /// The number of commands without a grant.
    fn missing(&self) -> u32 {
        u32::try_from(self.commands.len() - self.grants.len()).unwrap_or(u32::MAX)
    }

    fn is_undecided(&self) -> bool {
        self.missing() > 0
            && matches!(self.remainder, RemainderState::Undecided | RemainderState::AwaitingInstalls { .. })
    }

    fn is_awaiting_installs(&self) -> bool {
        self.missing() > 0 && matches!(self.remainder, RemainderState::AwaitingInstalls { .. })
    }

    /// Denies the other commands: nobody was about to install units any more, nor has given any back.
    fn deny_awaiting(&mut self) {
        if let RemainderState::AwaitingInstalls { limits, denial, at } = self.remainder {
            self.remainder = RemainderState::Denied { limits, denial, at, redis_ms: 0 };
        }
    }

    fn needs_reservation(&self) -> bool {
        self.missing() > 0 && matches!(self.remainder, RemainderState::NeedsReservation { .. })
    }

    /// Applies the reply of `quota_spend`. Never denies: only the store knows whether a window is full.
    fn apply_spend(&mut self, reply: Option<SpendReply>, clock: Option<&dyn Clock>) {
        self.returns = if let Some(SpendReply::Spent(hash_state)) = &reply { hash_state.returns } else { 0 };
        self.apply(reply, clock, 0);
        if let RemainderState::Denied { redis_ms, .. } = self.remainder {
            self.remainder = RemainderState::NeedsReservation { nonce: String::new(), redis_ms };
        }
    }

    /// `recorded` units are shown as sent by the store.
    fn apply(&mut self, reply: Option<SpendReply>, clock: Option<&dyn Clock>, recorded: u32) {
        self.remainder = match reply {
            Some(SpendReply::NoHash { nonce, redis_ms }) => {
                RemainderState::NeedsReservation { nonce, redis_ms }
            }
            Some(SpendReply::Spent(mut hash_state)) => {
                if let Some(clock) = clock {
                    hash_state.remaining = hash_state.reset_at().since(clock.now());
                }
                let unrecorded = hash_state.spent.saturating_sub(recorded);
                self.unrecorded.add(Unrecorded { window: hash_state.window, units: unrecorded });
                self.add_grants(&hash_state)
            }
            Some(SpendReply::Refused) => RemainderState::Undecided,
            Some(SpendReply::Outdated) | None => RemainderState::LeftToStore,
        };
    }

    /// Grants the spent units, and returns how the other commands are decided.
    fn add_grants(&mut self, hash_state: &HashState) -> RemainderState {
        let (limits, at) = (hash_state.limits, hash_state.decided_at());
        for nth in 1..=hash_state.spent {
            let count = hash_state.count - hash_state.spent + nth;
            let remaining = limits.rate_limit().saturating_sub(count);
            let grant = Grant { remaining, reset_at: hash_state.reset_at() };
            self.grants.push(SendGrant { limits, grant, at });
        }
        if hash_state.reserved < limits.rate_limit() {
            return RemainderState::NeedsReservation { nonce: String::new(), redis_ms: hash_state.redis_ms };
        }
        // Units that came back to the store after it was asked are not in the hash: it has to be asked again.
        if hash_state.returns != self.returns {
            return RemainderState::Undecided;
        }
        let denial = Denial { reason: DenialReason::QuotaExceeded, retry_after: hash_state.remaining };
        if hash_state.pending > 0 {
            return RemainderState::AwaitingInstalls { limits, denial, at };
        }
        RemainderState::Denied { limits, denial, at, redis_ms: hash_state.redis_ms }
    }
}

pub(super) async fn send_batch(
    shared: &SharedQuota,
    write_behind: &WriteBehind,
    batch: Vec<SendMessage>,
) -> Result<Vec<SendOutcome>> {
    let mut all_sends = group_by_user(&batch);
    // The hash of a user whose limits have just changed may hold the old ones.
    for sends in all_sends.iter_mut().filter(|sends| shared.invalidations.contains(sends.user)) {
        sends.remainder = RemainderState::LeftToStore;
    }
    let wait_until = Instant::now() + shared.install_wait;
    let mut rounds = 0;
    while rounds < ROUNDS_MAX {
        spend_reserved(shared, &mut all_sends).await;
        reserve(shared, &mut all_sends).await?;
        if !all_sends.iter().any(UserSends::is_undecided) {
            break;
        }
        let has_waited = wait_for_installs(shared, &mut all_sends, wait_until).await;
        rounds += usize::from(!has_waited);
    }
    let granted = all_sends.iter().filter(|sends| !sends.grants.is_empty());
    write_behind.track(granted.map(|sends| (sends.user, sends.unrecorded)));
    if all_sends
        .iter()
        .all(|sends| sends.grants.is_empty() && matches!(sends.remainder, RemainderState::LeftToStore))
    {
        drop(all_sends);
        return shared.store.send_batch(batch.into()).await;
    }
    let mut outcomes = vec![None; batch.len()];
    enqueue(shared, &batch, &all_sends, &mut outcomes).await?;
    let left_to_store = refuse(&all_sends, &mut outcomes);
    if !left_to_store.is_empty() {
        let rest: Vec<SendMessage> = left_to_store.iter().map(|&command| batch[command].clone()).collect();
        // An error of the store must not fail the commands that are decided already.
        let decided = shared.store.send_batch(rest.into()).await.unwrap_or_else(|error| {
            tracing::warn!(error = %error.with_causes(), "neither Redis nor the store behind it can decide a send");
            vec![SendOutcome::NotQueued(EnqueueOutcome::of_error(&error)); left_to_store.len()]
        });
        left_to_store.iter().zip(decided).for_each(|(&command, outcome)| outcomes[command] = Some(outcome));
    }
    Ok(outcomes.into_iter().map(|outcome| outcome.expect("every command is decided above")).collect())
}

fn group_by_user(batch: &[SendMessage]) -> Vec<UserSends<'_>> {
    let mut indices: HashMap<&UserId, usize> = HashMap::with_capacity(batch.len());
    let mut all_sends: Vec<UserSends<'_>> = Vec::new();
    for (command, SendMessage { user, .. }) in batch.iter().enumerate() {
        let index = *indices.entry(user).or_insert_with(|| {
            let (commands, grants, unrecorded) = (Vec::new(), Vec::new(), Unrecorded::default());
            let remainder = RemainderState::Undecided;
            all_sends.push(UserSends { user, commands, grants, unrecorded, returns: 0, remainder });
            all_sends.len() - 1
        });
        all_sends[index].commands.push(command);
    }
    all_sends
}

/// Spends units that Redis has reserved.
async fn spend_reserved(shared: &SharedQuota, all_sends: &mut [UserSends<'_>]) {
    let calls: Vec<_> = all_sends
        .iter()
        .filter(|sends| sends.is_undecided())
        .map(|sends| KeyCall { key: key(sends.user), arguments: vec![sends.missing().to_string()] })
        .collect();
    let nonce = format!("{:016x}", fastrand::u64(..));
    let common = [&*shared.epoch(), &shared.now(), &nonce];
    let replies = shared.redis.call_each(Script::QuotaSpend, &common, &calls).await;
    let undecided = all_sends.iter_mut().filter(|sends| sends.is_undecided());
    for (sends, reply) in undecided.zip(replies) {
        sends.apply_spend(reply.ok().as_ref().and_then(parse_spend), shared.clock.as_deref());
    }
}

/// Waits while other callers may be about to install units for users whose windows are full, or to give some back to the store.
/// Denies where nothing has come, and stops where units have come or at the deadline. Returns whether there was a reason and time
/// to wait.
async fn wait_for_installs(shared: &SharedQuota, all_sends: &mut [UserSends<'_>], until: Instant) -> bool {
    let (mut pause, mut has_waited) = (INSTALL_PAUSE, false);
    loop {
        let mut awaiting: Vec<_> =
            all_sends.iter_mut().filter(|sends| sends.is_awaiting_installs()).collect();
        if awaiting.is_empty() || Instant::now() + pause >= until {
            return has_waited;
        }
        tokio::time::sleep(pause).await;
        has_waited = true;
        pause = (pause * 2).min(INSTALL_PAUSE_MAX);
        let calls: Vec<_> =
            awaiting.iter().map(|sends| KeyCall { key: key(sends.user), arguments: Vec::new() }).collect();
        let replies = shared.redis.call_each(Script::QuotaPeek, &[&shared.epoch()], &calls).await;
        let mut is_settled = false;
        for (sends, reply) in awaiting.iter_mut().zip(replies) {
            match reply.ok().and_then(|reply| parse_peek(&reply)) {
                Some(hash) if hash.unused() > 0 || hash.returns != sends.returns => is_settled = true,
                Some(hash) if hash.pending > 0 => {}
                Some(_) => sends.deny_awaiting(),
                None => is_settled = true,
            }
        }
        if is_settled {
            return true;
        }
    }
}

/// Reserves units in the store for all users with too few, installs them in Redis and spends the missing ones.
async fn reserve(shared: &SharedQuota, all_sends: &mut [UserSends<'_>]) -> Result<()> {
    let mut short: Vec<_> = all_sends.iter_mut().filter(|sends| sends.needs_reservation()).collect();
    if short.is_empty() {
        return Ok(());
    }
    let reservations = short
        .iter()
        .map(|sends| ReservationRequest { user: sends.user.clone(), units: sends.missing() })
        .collect();
    // Nothing is enqueued before everything is reserved.
    let reserved = shared.store.reserve(reservations).await.map_err(Error::before_commit)?;
    let mut calls = Vec::with_capacity(short.len());
    for (sends, reserved) in short.iter_mut().zip(&reserved) {
        match reserved {
            Some(reserved) => calls.push(install_call(sends, reserved, shared.clock.is_some())),
            None => sends.remainder = RemainderState::NotConfigured,
        }
    }
    let replies = shared.redis.call_each(Script::QuotaInstall, &[&shared.epoch()], &calls).await;
    let mut unused = Vec::new();
    let installed = short.iter_mut().zip(reserved).filter_map(|(sends, reserved)| Some((sends, reserved?)));
    for ((sends, reserved), reply) in installed.zip(replies) {
        let reply = match reply {
            Ok(reply) => parse_spend(&reply),
            Err(NoReply) => Some(SpendReply::Spent(spend_own_reservation(sends, &reserved))),
        };
        if reply == Some(SpendReply::Refused) && reserved.units > 0 {
            let (user, window) = (sends.user.clone(), reserved.row.last_refresh);
            unused.push(ReservedUnits { user, window, units: reserved.units });
        }
        // The store shows what was requested of it as sent.
        let recorded = sends.missing().min(reserved.units);
        sends.apply(reply, shared.clock.as_deref(), recorded);
        if sends.needs_reservation() {
            sends.remainder = RemainderState::Undecided;
        }
    }
    if unused.is_empty() { Ok(()) } else { shared.store.return_unused(unused).await }
}

/// Spends the units that were reserved for these very sends when Redis does not reply to their installation. If it has
/// installed them, it has also spent them for these sends; if not, nobody else gets them.
fn spend_own_reservation(sends: &UserSends<'_>, reserved: &Reservation) -> HashState {
    let Reservation { row, units, at } = reserved;
    let spent = sends.missing().min(*units);
    HashState {
        spent,
        count: row.counted().saturating_sub(*units).saturating_add(spent),
        reserved: row.counted(),
        limits: row.limits,
        window: row.last_refresh,
        remaining: row.reset_at().since(*at),
        redis_ms: 0,
        pending: 0,
        returns: sends.returns,
    }
}

fn install_call(sends: &UserSends<'_>, reserved: &Reservation, has_test_clock: bool) -> KeyCall {
    let Reservation { row, units, at } = reserved;
    let (nonce, redis_ms) = match &sends.remainder {
        RemainderState::NeedsReservation { nonce, redis_ms } => (nonce.clone(), *redis_ms),
        _ => Default::default(),
    };
    // Counted from Redis's time of the spend, which was before the reservation, so the hash never outlives the window.
    let mut remaining = row.reset_at().since(*at);
    if has_test_clock {
        // That clock ends the window (`quota_spend`), and may stand still for longer than is left of it.
        remaining = remaining.saturating_add(Duration::from_secs(3_600));
    }
    let remaining_ms = i64::try_from(remaining.as_millis()).unwrap_or(i64::MAX);
    let arguments = vec![
        nonce,
        row.last_refresh.as_micros().to_string(),
        units.to_string(),
        row.counted().to_string(),
        row.limits.rate_limit().to_string(),
        row.limits.time_window_minutes().to_string(),
        redis_ms.saturating_add(remaining_ms).to_string(),
        sends.missing().to_string(),
    ];
    KeyCall { key: key(sends.user), arguments }
}

/// Enqueues the granted sends in the order of the batch. Units are not given back when that fails, since another send may
/// have been denied for lack of them.
async fn enqueue(
    shared: &SharedQuota,
    batch: &[SendMessage],
    all_sends: &[UserSends<'_>],
    outcomes: &mut [Option<SendOutcome>],
) -> Result<()> {
    let mut granted: Vec<(usize, SendGrant)> = all_sends
        .iter()
        .flat_map(|sends| sends.commands.iter().copied().zip(sends.grants.iter().copied()))
        .collect();
    granted.sort_unstable_by_key(|(command, _)| *command);
    let accepted: Vec<_> = granted
        .iter()
        .map(|&(command, SendGrant { at, .. })| {
            let SendMessage { user, message, trace, key: _ } = &batch[command];
            let message_id = MessageId::new(at, random_bytes());
            AcceptedMessage { message_id, user, message, trace: trace.as_ref(), at }
        })
        .collect();
    let queued = shared.store.enqueue(&accepted).await?;
    for (((command, SendGrant { limits, grant, at }), accepted), queued) in
        granted.into_iter().zip(accepted).zip(queued)
    {
        outcomes[command] = Some(match queued {
            EnqueueOutcome::Enqueued => {
                SendOutcome::Accepted { message_id: accepted.message_id, limits, grant, at }
            }
            failed => SendOutcome::NotQueued(failed),
        });
    }
    Ok(())
}

/// Sets the outcomes of commands without a grant and returns those that the store has to decide.
fn refuse(all_sends: &[UserSends<'_>], outcomes: &mut [Option<SendOutcome>]) -> Vec<usize> {
    let mut left_to_store = Vec::new();
    for UserSends { commands, grants, remainder, .. } in all_sends {
        for &command in &commands[grants.len()..] {
            match remainder {
                RemainderState::Denied { limits, denial, at, .. } => {
                    outcomes[command] =
                        Some(SendOutcome::Denied { limits: *limits, denial: *denial, at: *at });
                }
                RemainderState::NotConfigured => outcomes[command] = Some(SendOutcome::NotConfigured),
                RemainderState::Undecided
                | RemainderState::AwaitingInstalls { .. }
                | RemainderState::NeedsReservation { .. }
                | RemainderState::LeftToStore => {
                    left_to_store.push(command);
                }
            }
        }
    }
    left_to_store.sort_unstable();
    left_to_store
}
