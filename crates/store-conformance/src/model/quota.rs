//! The model as a quota store: it computes the window from all sends for each answer.

use std::time::Duration;

use async_trait::async_trait;
use weir_core::quota::{Grant, Quota, QuotaLimits};
use weir_core::verdict::DenialReason;
use weir_core::{Denial, MessageId, Timestamp, UserId};
use weir_queue::sms;
use weir_store::quota::{AcceptedMessage, QuotaAudit, QuotaStore, SendMessage, SendOutcome};
use weir_store::shard;
use weir_store::{Batch, Result};

use super::{AnsweredKey, MessageState, Model, QueuedMessage, State, User};

/// A window and the number of sends in it.
struct Window {
    start: Timestamp,
    count: u32,
}

impl User {
    fn window_micros(&self) -> i64 {
        i64::from(self.limits.time_window_minutes()) * 60_000_000
    }

    fn end_of(&self, window: &Window) -> Timestamp {
        Timestamp::from_micros(window.start.as_micros() + self.window_micros())
    }

    /// The window of the last send, found by replaying all sends.
    fn last_window(&self) -> Window {
        let mut window = Window { start: self.since, count: 0 };
        for &at in &self.sends {
            if at >= self.end_of(&window) {
                window = Window { start: at, count: 0 };
            }
            window.count += 1;
        }
        window
    }

    /// If the clock was set back behind the last window, moves that window, with its sends, to the present.
    fn move_back(&mut self, now: Timestamp) {
        let last = self.last_window();
        if last.start > now {
            self.since = now;
            self.sends = vec![now; last.count as usize];
        }
    }

    fn send(&mut self, now: Timestamp) -> std::result::Result<Grant, Denial> {
        self.move_back(now);
        let last = self.last_window();
        let is_over = now >= self.end_of(&last);
        let open = if is_over { Window { start: now, count: 0 } } else { last };
        let reset_at = self.end_of(&open);
        let limit = self.limits.rate_limit();
        if open.count >= limit {
            let wait_micros = reset_at.as_micros() - now.as_micros();
            let retry_after = Duration::from_micros(wait_micros.unsigned_abs());
            return Err(Denial { reason: DenialReason::QuotaExceeded, retry_after });
        }
        self.sends.push(now);
        self.kept = if is_over { 0 } else { self.kept };
        Ok(Grant { remaining: limit - open.count - 1, reset_at })
    }

    /// Takes new limits and keeps the window and its count, unless the window is over.
    fn change_limits(&mut self, limits: QuotaLimits, now: Timestamp) {
        self.move_back(now);
        let last = self.last_window();
        let is_over = now >= self.end_of(&last);
        self.since = if is_over { now } else { last.start };
        self.kept = if is_over { 0 } else { last.count };
        self.sends = vec![self.since; self.kept as usize];
        self.limits = limits;
    }

    /// The highest count that the audit accepts.
    fn count_max(&self) -> u32 {
        self.limits.rate_limit().max(self.kept)
    }

    fn row(&self, now: Timestamp) -> Quota {
        let last = self.last_window();
        let current_count = if now >= self.end_of(&last) { 0 } else { last.count };
        Quota { current_count, ..Quota::new(self.limits, last.start) }
    }
}

impl State {
    fn enqueue(&mut self, accepted: &AcceptedMessage<'_>, shards: u16) {
        let key = accepted.user.as_str().to_owned();
        self.entries.push(QueuedMessage {
            shard: shard::of(&key, shards),
            key,
            payload: sms::encode(accepted),
            attempts: 0,
            hidden_until: accepted.at,
            state: MessageState::Waiting,
        });
    }

    /// The answer to a key that was used within a day.
    fn answer(&self, command: &SendMessage, now: Timestamp) -> Option<SendOutcome> {
        let day = 86_400_000_000;
        let key = command.key?;
        let used = self
            .keys
            .iter()
            .rev()
            .find(|used| used.key.hash == key.hash && now.as_micros() - used.at.as_micros() < day)?;
        if used.key.message != key.message {
            return Some(SendOutcome::KeyConflict);
        }
        let row = self.users.get(command.user.as_str()).map(|user| user.row(now));
        Some(SendOutcome::Replayed { message_id: used.message_id, grant: used.grant, row, at: now })
    }

    fn send(&mut self, command: &SendMessage, now: Timestamp, shards: u16) -> SendOutcome {
        if let Some(answer) = self.answer(command, now) {
            return answer;
        }
        let Some(user) = self.users.get_mut(command.user.as_str()) else {
            return SendOutcome::NotConfigured;
        };
        let limits = user.limits;
        match user.send(now) {
            Err(denial) => SendOutcome::Denied { limits, denial, at: now },
            Ok(grant) => {
                let message_id = MessageId::new(now, std::array::from_fn(|_| fastrand::u8(..)));
                self.enqueue(
                    &AcceptedMessage {
                        message_id,
                        user: &command.user,
                        message: &command.message,
                        trace: None,
                        at: now,
                    },
                    shards,
                );
                if let Some(key) = command.key {
                    self.keys.retain(|used| used.key.hash != key.hash);
                    self.keys.push(AnsweredKey { key, message_id, grant, at: now });
                }
                SendOutcome::Accepted { message_id, limits, grant, at: now }
            }
        }
    }
}

impl Model {
    /// The highest count of a user that the audit accepts.
    ///
    /// # Panics
    /// If there is no such user.
    #[must_use]
    pub fn count_max(&self, user: &str) -> u32 {
        self.state.lock().users.get(user).expect("the user is configured").count_max()
    }
}

#[async_trait]
impl QuotaStore for Model {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let now = self.now();
        let configured = User { limits, since: now, sends: Vec::new(), kept: 0 };
        let row = configured.row(now);
        self.state.lock().users.insert(user.as_str().to_owned(), configured);
        Ok(row)
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let now = self.now();
        let mut state = self.state.lock();
        let new = || User { limits, since: now, sends: Vec::new(), kept: 0 };
        let user = state.users.entry(user.as_str().to_owned()).or_insert_with(new);
        user.change_limits(limits, now);
        Ok(user.row(now))
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        let (state, now) = (self.state.lock(), self.now());
        let is_after = |name: &str| after.is_none_or(|after| name > after.as_str());
        let rows = state.users.iter().filter(|(name, _)| is_after(name)).take(limit);
        Ok(rows.map(|(name, user)| (UserId::parse(name).expect("it was a user id"), user.row(now))).collect())
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        Ok(self.state.lock().users.get(user.as_str()).map(|found| found.row(self.now())))
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        Ok(self.state.lock().users.remove(user.as_str()).is_some())
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let mut state = self.state.lock();
        let now = self.now();
        let outcomes = batch.take().iter().map(|command| state.send(command, now, self.shards)).collect();
        self.sent.notify_one();
        Ok(outcomes)
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        let (mut state, now) = (self.state.lock(), self.now());
        let is_expired = |used: &AnsweredKey| now.as_micros() - used.at.as_micros() >= 86_400_000_000;
        let purged = state.keys.iter().take(limit).take_while(|used| is_expired(used)).count();
        state.keys.drain(..purged);
        Ok(purged)
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        let state = self.state.lock();
        let over = |user: &User| user.last_window().count > user.count_max();
        let over_limit =
            state.users.iter().filter(|(_, user)| over(user)).map(|(name, _)| name.clone()).collect();
        Ok(QuotaAudit { users: state.users.len() as u64, over_limit })
    }
}
