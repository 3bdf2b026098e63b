//! Attempts that all servers on one Redis count together (`throttle.lua`): those of one user, and those of one address.
//!
//! On one Redis the script that decides a purchase counts the attempt, so it costs no call. On a cluster users and addresses are
//! on other servers than sales, so an attempt is counted by a call of its own. A server asks only about what its own memory
//! lets pass, and while Redis does not answer that memory alone decides.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use weir_core::{Clock, UserId};
use weir_store::sale::{AttemptLimits, Buy};
use weir_store::throttle::AddressLimit;

use crate::client::{KeyCall, Redis};
use crate::script::Script;

/// Counts attempts over all servers. Clones share it.
#[derive(Clone, Debug)]
pub struct RedisAttempts {
    redis: Redis,
    /// Replaces Redis's clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisAttempts {
    /// Counts on `redis`, which should be a client that gives up soon. `clock` replaces Redis's own in tests.
    #[must_use]
    pub const fn new(redis: Redis, clock: Option<Arc<dyn Clock>>) -> Self {
        Self { redis, clock }
    }

    /// Returns whether the script that decides a purchase counts the attempt, too.
    #[must_use]
    pub fn counts_purchases(&self) -> bool {
        !self.redis.is_cluster()
    }

    /// Counts an attempt of a user. Returns how long to wait if it is one too many; `None` also while Redis does not answer.
    pub async fn count_user(&self, user: &UserId, per_second: u32) -> Option<Duration> {
        if per_second == 0 {
            return None;
        }
        self.count("user", &format!("{per_second}:{}", user.as_str()), per_second, 0).await
    }

    /// Counts a request of an address. Returns how long to wait if it is one too many; `None` also while Redis does not answer.
    pub async fn count_address(&self, limit: &AddressLimit) -> Option<Duration> {
        self.count("address", &address_name(limit), limit.per_second, limit.burst).await
    }

    async fn count(&self, kind: &str, name: &str, limit: u32, burst: u32) -> Option<Duration> {
        // `sale_buy.lua` uses the keys of one Redis, too. On a cluster they are spread over its servers.
        let key = if self.redis.is_cluster() {
            format!("sale:{{_{kind}:{name}}}")
        } else {
            format!("sale:{{_{kind}}}:{name}")
        };
        let calls = [KeyCall { key, arguments: vec![limit.to_string(), burst.to_string()] }];
        let now = self.clock.as_ref().map(|clock| clock.now().as_micros().to_string()).unwrap_or_default();
        match self.redis.call_each(Script::SaleAttempt, &[&now], &calls).await.first() {
            Some(Ok(Value::Int(millis @ 1..))) => Some(Duration::from_millis(millis.unsigned_abs())),
            _ => None,
        }
    }
}

/// The arguments of `sale_buy.lua` for one attempt: the buyer, its limit and the address.
pub(super) fn arguments(buy: &Buy, is_cluster: bool) -> [String; 3] {
    let AttemptLimits { user_per_second, address } = &buy.limits;
    let (user_per_second, address) =
        if is_cluster { (&0, None) } else { (user_per_second, address.as_ref()) };
    [buy.buyer.to_string(), user_per_second.to_string(), address.map(address_name).unwrap_or_default()]
}

/// Names an address together with its limit: servers with different settings count apart.
fn address_name(limit: &AddressLimit) -> String {
    let AddressLimit { address, per_second, burst } = limit;
    format!("{per_second}:{burst}:{address}")
}
