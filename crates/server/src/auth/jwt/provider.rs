//! The keys of an identity provider: fetched from the URL of its key set (JWKS), and fetched again every ten minutes and when
//! a token names a key that is not among them.
//!
//! One task fetches. Callers whose token names an unknown key wait for it, unless it has just fetched: unknown keys cost the
//! provider one call in ten seconds, whoever sends them. The keys in use stay until the provider answers with
//! another key set, which may be empty.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue, StatusCode};
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{KeySet, RequiredClaims, VerificationKey, key_set};
use crate::outbound::{OutboundClient, OutboundError, OutboundLimits, OutboundTarget, Reach};

/// The largest key set. Those of large providers have some kilobytes.
const BYTES_MAX: usize = 256 * 1024;
/// The first and the longest pause between attempts at the start.
const START_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// When keys are fetched, and how long that may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// How long a start waits for the first keys.
    pub start: Duration,
    /// The time between two fetches at least, and after one that failed.
    pub pause: Duration,
    /// The time until keys are fetched again without a reason.
    pub refresh: Duration,
    /// The time to connect.
    pub connect_timeout: Duration,
    /// The time for the response, once connected.
    pub read_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(10),
            pause: Duration::from_secs(10),
            refresh: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(2),
            read_timeout: Duration::from_secs(3),
        }
    }
}

/// Why the key set was not replaced.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error(transparent)]
    NoResponse(#[from] OutboundError),
    #[error("the provider answered {0}")]
    Status(StatusCode),
    #[error("the answer is not a key set: {0}")]
    NotKeySet(#[from] serde_json::Error),
}

#[derive(Clone, Copy, Debug, Default)]
struct LastFetch {
    ended: Option<Instant>,
    has_succeeded: bool,
}

/// The published keys of a provider, and the server's own secret if it has one.
struct CurrentKeys {
    set: Arc<KeySet>,
    /// The response that the keys were read from.
    document: Bytes,
}

pub(super) struct ProviderKeys {
    client: OutboundClient,
    target: OutboundTarget,
    /// The URL as the log shows it, without user, password and query.
    name: String,
    own_key: Option<VerificationKey>,
    required: RequiredClaims,
    timing: Timing,
    current: RwLock<CurrentKeys>,
    last_fetch: watch::Sender<LastFetch>,
    refresh_requested: Notify,
}

impl ProviderKeys {
    /// Starts with `own_key` alone. Returns `None` if the URL cannot be called.
    pub(super) fn new(
        url: &Url,
        own_key: Option<VerificationKey>,
        required: RequiredClaims,
        timing: Timing,
    ) -> Option<Self> {
        let limits = OutboundLimits {
            connect_timeout: timing.connect_timeout,
            read_timeout: timing.read_timeout,
            body_max: BYTES_MAX,
            idle_max: 0,
        };
        let target = OutboundTarget::new(url)?;
        let uri = target.uri();
        let name =
            format!("{}://{}{}", url.scheme(), uri.authority().map_or("", |host| host.as_str()), uri.path());
        let set = Arc::new(KeySet::new(own_key.clone(), &required));
        Some(Self {
            client: OutboundClient::new(Reach::Anywhere, limits),
            target,
            name,
            own_key,
            required,
            timing,
            current: RwLock::new(CurrentKeys { set, document: Bytes::new() }),
            last_fetch: watch::Sender::default(),
            refresh_requested: Notify::new(),
        })
    }

    pub(super) fn current(&self) -> Arc<KeySet> {
        Arc::clone(&self.current.read().set)
    }

    /// Fetches the first keys. Gives up after a while: the server then starts without them.
    pub(super) async fn fetch_first(&self) {
        let attempts = async {
            let (mut pause, pause_max) = START_PAUSES;
            while self.fetch().await.is_err() {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(pause_max);
            }
        };
        if tokio::time::timeout(self.timing.start, attempts).await.is_err() {
            let Self { name, timing, .. } = self;
            tracing::warn!(
                "there are no keys from {name} after {:?}; starting without them: tokens of the provider are refused until \
                 it answers",
                timing.start
            );
        }
    }

    /// Fetches the keys whenever that is due, until the server stops.
    pub(super) async fn keep_fresh(&self, closing: &CancellationToken) {
        while closing.run_until_cancelled(self.wait_until_due()).await.is_some() {
            let _ = closing.run_until_cancelled(self.fetch()).await;
        }
    }

    async fn wait_until_due(&self) {
        let LastFetch { ended, has_succeeded } = *self.last_fetch.borrow();
        let Some(ended) = ended else { return };
        tokio::time::sleep_until(ended + self.timing.pause).await;
        if has_succeeded {
            tokio::select! {
                () = tokio::time::sleep_until(ended + self.timing.refresh) => {}
                () = self.refresh_requested.notified() => {}
            }
        }
    }

    /// Asks for new keys because a token names this one, and waits for them unless they were fetched a moment ago.
    /// Returns whether the key is known now.
    pub(super) async fn fetch_key(&self, key_id: &str) -> bool {
        let mut last_fetch = self.last_fetch.subscribe();
        let ended = last_fetch.borrow_and_update().ended;
        self.refresh_requested.notify_one();
        if ended.is_none_or(|ended| ended.elapsed() >= self.timing.pause) {
            let wait = self.timing.connect_timeout + self.timing.read_timeout;
            let _ = tokio::time::timeout(wait, last_fetch.changed()).await;
        }
        self.current().has(key_id)
    }

    /// Fetches the keys once. If that fails, those in use stay.
    pub(super) async fn fetch(&self) -> Result<(), FetchError> {
        let fetched = match self.download().await {
            Ok(document) => self.replace(document),
            Err(error) => Err(error),
        };
        if let Err(error) = &fetched {
            let known = self.current().len();
            tracing::warn!("cannot fetch keys from {}: {error}; {known} known keys stay in use", self.name);
        }
        let last = LastFetch { ended: Some(Instant::now()), has_succeeded: fetched.is_ok() };
        self.last_fetch.send_replace(last);
        fetched
    }

    async fn download(&self) -> Result<Bytes, FetchError> {
        let json = HeaderValue::from_static("application/json, application/jwk-set+json");
        let response = self.client.get(&self.target, HeaderMap::from_iter([(ACCEPT, json)])).await?;
        if response.status == StatusCode::OK {
            Ok(response.body)
        } else {
            Err(FetchError::Status(response.status))
        }
    }

    /// Replaces the keys, and with them the tokens that the old ones have verified, if the document is a new one.
    fn replace(&self, document: Bytes) -> Result<(), FetchError> {
        if self.current.read().document == document {
            return Ok(());
        }
        let keys = key_set::usable_keys(&document)?;
        // A provider may have to withdraw its only key before it has another.
        if keys.is_empty() {
            let name = &self.name;
            tracing::warn!("the key set of {name} has no usable key; tokens of the provider are refused");
        } else {
            tracing::info!("fetched {} keys from {}", keys.len(), self.name);
        }
        let set = Arc::new(KeySet::new(keys.into_iter().chain(self.own_key.clone()), &self.required));
        *self.current.write() = CurrentKeys { set, document };
        Ok(())
    }
}

#[cfg(test)]
mod tests;
