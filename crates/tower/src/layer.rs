//! The layer, and the service it creates.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use weir_core::Clock;
use weir_core::tier::{Decision, Limit, ScopedRule};
use weir_limiter::{Memory, MemoryOptions};
use weir_store::clock::SteadyClock;

use crate::answer::{self, RateLimitHeaders};
use crate::key::Key;
use crate::policy::Policy;

/// The default of [`LimitLayer::keys_max`].
const KEYS_MAX: usize = 1_000_000;

/// Limits callers by a policy. Clones and all services that it creates share their counters.
pub struct LimitLayer<K> {
    shared: Arc<Shared<K>>,
}

struct Shared<K> {
    policy: Policy,
    scoped: Arc<ScopedRule<Limit>>,
    memory: Memory<Limit>,
    keys_max: usize,
    clock: Arc<dyn Clock>,
    key: K,
}

impl<K> LimitLayer<K> {
    /// Creates a layer that counts requests separately for each `key`.
    #[must_use]
    pub fn new(policy: Policy, key: K) -> Self {
        Self::build(policy, key, KEYS_MAX, Arc::new(SteadyClock))
    }

    /// Sets how many callers with recent requests are stored, at about 100 bytes each. While the memory is full, new callers
    /// get 503. Resets all counters.
    #[must_use]
    pub fn keys_max(self, keys_max: usize) -> Self
    where
        K: Clone,
    {
        let Shared { policy, key, clock, .. } = &*self.shared;
        Self::build(policy.clone(), key.clone(), keys_max, Arc::clone(clock))
    }

    /// Sets the clock, for tests. Resets all counters.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self
    where
        K: Clone,
    {
        let Shared { policy, key, keys_max, .. } = &*self.shared;
        Self::build(policy.clone(), key.clone(), *keys_max, clock)
    }

    fn build(policy: Policy, key: K, keys_max: usize, clock: Arc<dyn Clock>) -> Self {
        let memory = Memory::new(MemoryOptions { keys_max, ..MemoryOptions::default() });
        let scoped = Arc::new(ScopedRule { scope: 0, rule: policy.limit });
        Self { shared: Arc::new(Shared { policy, scoped, memory, keys_max, clock, key }) }
    }
}

impl<K> Clone for LimitLayer<K> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S, K> tower::Layer<S> for LimitLayer<K> {
    type Service = Limited<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited { inner, shared: Arc::clone(&self.shared) }
    }
}

/// A service whose callers are limited by a policy.
pub struct Limited<S, K> {
    inner: S,
    shared: Arc<Shared<K>>,
}

impl<S: Clone, K> Clone for Limited<S, K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

/// The decision about a request.
enum Outcome {
    Allowed(RateLimitHeaders),
    Denied(RateLimitHeaders),
    Full,
}

impl<K> Shared<K> {
    fn decide<B>(&self, request: &Request<B>) -> Outcome
    where
        K: Key<B>,
    {
        let (key, now) = (self.key.key(request).unwrap_or_default(), self.clock.now());
        let Ok(taken) = self.memory.take(&self.scoped, &key, 1, now) else {
            return if self.policy.is_shadow { self.unknown() } else { Outcome::Full };
        };
        let limit_state = self.policy.limit.limit_state(&taken.spent, now);
        match taken.decision {
            Decision::Denied(refusal) if !self.policy.is_shadow => {
                Outcome::Denied(RateLimitHeaders::new(&self.policy, &limit_state, refusal.retry_after))
            }
            Decision::Denied(refusal) => {
                Outcome::Allowed(RateLimitHeaders::new(&self.policy, &limit_state, refusal.retry_after))
            }
            Decision::Allowed => Outcome::Allowed(RateLimitHeaders::new(&self.policy, &limit_state, None)),
        }
    }

    /// The state sent to a caller that could not be stored, by a policy that only observes.
    fn unknown(&self) -> Outcome {
        let limit_state = self
            .policy
            .limit
            .limit_state(&weir_core::tier::Rule::unspent(&self.policy.limit), self.clock.now());
        Outcome::Allowed(RateLimitHeaders::new(&self.policy, &limit_state, None))
    }
}

impl<S, K, B, R> tower::Service<Request<B>> for Limited<S, K>
where
    S: tower::Service<Request<B>, Response = Response<R>>,
    K: Key<B>,
    R: From<String>,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = LimitedFuture<S::Future, R, K>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let name = &self.shared.policy.name;
        match self.shared.decide(&request) {
            Outcome::Allowed(headers) => LimitedFuture::Allowed {
                inner: self.inner.call(request),
                headers,
                shared: Arc::clone(&self.shared),
            },
            Outcome::Denied(headers) => LimitedFuture::Answered { response: Some(headers.deny(name)) },
            Outcome::Full => LimitedFuture::Answered { response: Some(answer::full()) },
        }
    }
}

pin_project! {
    /// The response of a [`Limited`] service.
    #[project = Projected]
    pub enum LimitedFuture<F, R, K> {
        /// The inner service handles the request.
        Allowed {
            #[pin]
            inner: F,
            headers: RateLimitHeaders,
            shared: Arc<Shared<K>>,
        },
        /// The request was refused.
        Answered { response: Option<Response<R>> },
    }
}

impl<F, E, R, K> Future for LimitedFuture<F, R, K>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<R>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            Projected::Allowed { inner, headers, shared } => {
                let mut answered = ready!(inner.poll(context));
                if let Ok(response) = &mut answered {
                    headers.write(&shared.policy.name, response.headers_mut());
                }
                Poll::Ready(answered)
            }
            Projected::Answered { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                // Polled again after it was ready.
                None => Poll::Pending,
            },
        }
    }
}

impl<K> std::fmt::Debug for LimitLayer<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LimitLayer").field("policy", &self.shared.policy).finish_non_exhaustive()
    }
}

impl<S, K> std::fmt::Debug for Limited<S, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limited").field("policy", &self.shared.policy).finish_non_exhaustive()
    }
}
