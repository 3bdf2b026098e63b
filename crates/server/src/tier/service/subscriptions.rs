//! Subscriptions, cached: every AI call needs one, and they rarely change.
//!
//! An entry is current until the subscription expires or changes: on this server, which marks it at once, or on another one, which
//! `tier/service/definition_sync.rs` notices. An entry that is marked is read again, and stays in use while the store does not
//! answer. A plan that was read before a change is not cached after it.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::Plan;
use weir_core::{Clock, Timestamp, UserId};
use weir_store::Result;
use weir_store::bounded_cache::{BoundedCache, Version};
use weir_store::tier::{Subscription, SubscriptionTerms, TierStore};

use crate::engines::within;
use crate::tier::events::PlanUnavailable;

const SHARDS: usize = 64;
/// Cached users per shard.
const SHARD_MAX: usize = 16_384;
/// How many subscriptions are read at the start, half of what has room.
const PRELOADED_MAX: usize = SHARDS * SHARD_MAX / 2;
/// Subscriptions that one call reads at the start.
const PRELOAD_PAGE: usize = 1_000;
/// How long a call waits for a store that does not answer.
const READ_TIMEOUT: Duration = Duration::from_millis(500);
/// How long an entry stays in use without another attempt to read it, after one that failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

pub(super) struct Subscriptions {
    store: Arc<dyn TierStore>,
    /// Measures how long subscriptions have left.
    clock: Arc<dyn Clock>,
    users: BoundedCache<Box<str>, KnownUser>,
}

/// What is known of a user.
#[derive(Clone, Copy, Debug)]
struct KnownUser {
    /// The plan that the user has subscribed to.
    plan: Option<Plan>,
    /// Until when, by the clock of this server. `None` if the subscription never expires.
    expires_at: Option<Timestamp>,
    /// Set if the subscription may have changed: when to read it again.
    read_again_at: Option<Timestamp>,
}

impl KnownUser {
    /// `asked_at` is a time before the subscription was read, so the entry never outlives it.
    fn new(subscription: Option<&Subscription>, asked_at: Timestamp) -> Self {
        Self {
            plan: subscription.map(|subscription| subscription.terms.plan),
            expires_at: subscription.and_then(|it| it.expires_in).map(|left| asked_at.plus(left)),
            read_again_at: None,
        }
    }

    /// Asks for another read at once.
    const fn mark(&mut self) {
        self.read_again_at = Some(Timestamp::from_micros(i64::MIN));
    }

    /// Keeps the entry in use until another read, after one that failed.
    fn keep_until(&mut self, read_again_at: Timestamp, clock: &dyn Clock) {
        // Somebody else may have read it meanwhile.
        if self.is_current(clock) {
            return;
        }
        if self.has_expired(clock) {
            (self.plan, self.expires_at) = (None, None);
        }
        self.read_again_at = Some(read_again_at);
    }

    fn has_expired(&self, clock: &dyn Clock) -> bool {
        self.expires_at.is_some_and(|at| at <= clock.now())
    }

    fn is_current(&self, clock: &dyn Clock) -> bool {
        self.read_again_at.is_none_or(|at| clock.now() < at) && !self.has_expired(clock)
    }
}

impl Subscriptions {
    pub(super) fn new(store: Arc<dyn TierStore>, clock: Arc<dyn Clock>) -> Self {
        Self { store, clock, users: BoundedCache::new(SHARDS, SHARD_MAX) }
    }

    /// The plan that a user has subscribed to. `None` without a subscription, and for users of whom nothing is known while the
    /// store does not answer.
    pub(super) async fn plan(&self, user: &str) -> Option<Plan> {
        let known = self.users.get(user, |_| true);
        if let Some(known) = known
            && known.is_current(&*self.clock)
        {
            return known.plan;
        }
        // Boxed to keep this future small: most users are cached.
        Box::pin(self.read_plan(user, known, self.users.version())).await
    }

    /// Reads the plan of a user who is not cached, or whose entry is not current.
    async fn read_plan(&self, user: &str, known: Option<KnownUser>, version: Version) -> Option<Plan> {
        // No subscription can have an invalid name.
        let Ok(id) = UserId::parse(user) else { return None };
        let asked_at = self.clock.now();
        match within(READ_TIMEOUT, self.store.subscription(&id)).await {
            Ok(found) => {
                let read = KnownUser::new(found.as_ref(), asked_at);
                self.users.insert(user.into(), read, version, |known| self.is_worth_keeping(known));
                read.plan
            }
            Err(error) => {
                PlanUnavailable { error: &error }.emit();
                let mut known = known?;
                let read_again_at = self.clock.now().plus(RETRY_AFTER);
                known.keep_until(read_again_at, &*self.clock);
                self.users.modify(user, |known| known.keep_until(read_again_at, &*self.clock));
                known.plan
            }
        }
    }

    /// Users without a subscription are forgotten first: nothing is lost with them when the store does not answer.
    fn is_worth_keeping(&self, known: &KnownUser) -> bool {
        known.plan.is_some() && !known.has_expired(&*self.clock)
    }

    /// Reads subscriptions before they are needed, so that an outage right after a start finds them known. Returns how many.
    pub(super) async fn preload(&self, timeout: Duration) -> Result<usize> {
        let (mut after, mut count) = (None, 0);
        while self.users.len() < PRELOADED_MAX {
            let (version, asked_at) = (self.users.version(), self.clock.now());
            let page = within(timeout, self.store.subscriptions(after.as_ref(), PRELOAD_PAGE)).await?;
            count += page.len();
            for subscription in &page {
                let known = KnownUser::new(Some(subscription), asked_at);
                let user = subscription.user.as_str().into();
                self.users.insert(user, known, version, |known| self.is_worth_keeping(known));
            }
            if page.len() < PRELOAD_PAGE {
                break;
            }
            after = page.into_iter().next_back().map(|last| last.user);
        }
        Ok(count)
    }

    /// Reads the store, not the cache.
    pub(super) async fn read(&self, user: &UserId, timeout: Duration) -> Result<Option<Subscription>> {
        within(timeout, self.store.subscription(user)).await
    }

    /// Reads the store, not the cache.
    pub(super) async fn list(
        &self,
        after: Option<&UserId>,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<Subscription>> {
        within(timeout, self.store.subscriptions(after, limit)).await
    }

    pub(super) async fn put(
        &self,
        user: &UserId,
        terms: SubscriptionTerms,
        timeout: Duration,
    ) -> Result<Subscription> {
        let asked_at = self.clock.now();
        let put = within(timeout, self.store.put_subscription(user, terms)).await;
        self.apply(user, put.as_ref().ok().map(|put| KnownUser::new(Some(put), asked_at)));
        put
    }

    pub(super) async fn delete(&self, user: &UserId, timeout: Duration) -> Result<bool> {
        let deleted = within(timeout, self.store.delete_subscription(user)).await;
        self.apply(user, deleted.as_ref().ok().map(|_| KnownUser::new(None, Timestamp::EPOCH)));
        deleted
    }

    /// Applies a change by this server. It is read again, because others may make changes at the same time. `None` for a change
    /// that failed: the store may have made it all the same.
    fn apply(&self, user: &UserId, changed: Option<KnownUser>) {
        match changed {
            Some(mut changed) => {
                changed.mark();
                self.users.replace(user.as_str().into(), changed, |known| self.is_worth_keeping(known));
            }
            None => self.mark(user.as_str()),
        }
    }

    /// Has a user's subscription read again.
    pub(super) fn mark(&self, user: &str) {
        self.users.mark(user, KnownUser::mark);
    }

    /// Has all subscriptions read again.
    pub(super) fn mark_all(&self) {
        self.users.mark_all(KnownUser::mark);
    }
}
