//! What `weir keys` does with the keys of requests: counts which are in use and opens everything, and seals requests again with the
//! key that encrypts.
//!
//! Both read the requests in order of id, page by page, beside running servers. A rotation keeps no state: what is sealed with the
//! right key is skipped, so one that was stopped at any point is simply run again. Each request is changed in one statement, which
//! leaves a field alone that was changed meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::RequestId;
use weir_store::request::{Request, RequestStore, ResealedRequest, Sealed, SealedNames, SealingKey};
use weir_store::{Error, Result};

use super::encryption::{Keyring, OpenError, SealedField};
use super::stored_form;

/// How many requests a page has; only the names of their keys are read.
const PAGE: usize = 500;
/// How many requests that cannot be opened are listed.
const LISTED_MAX: usize = 20;
/// How many names of keys are counted. More can only come from a damaged table.
const NAMES_MAX: usize = 1_000;
/// How often all requests are gone through while servers still seal with another key.
const PASSES_MAX: usize = 3;
/// How often progress is reported.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// The keys of requests, and the store that they are used in.
pub struct KeyRotation {
    pub(crate) store: Arc<dyn RequestStore>,
    pub(crate) keys: Keyring,
}

/// Which keys are in use.
#[derive(Clone, Debug, Default)]
pub struct KeyUsage {
    /// How many requests were looked at.
    pub requests: u64,
    /// By the name of the key: in how many requests something is sealed with it.
    pub used: BTreeMap<String, u64>,
    /// How many requests have a text that is not sealed.
    pub unsealed: u64,
    /// How many requests have a field that cannot be opened.
    pub unreadable: u64,
    /// The first of them, with the reason.
    pub examples: Vec<(RequestId, String)>,
    /// The names of the request keys that open the key of the hashes of idempotency keys. Empty if keys are not hashed.
    pub hash_keys: Vec<String>,
    /// Whether this server can open the key of the hashes, if there is one.
    pub hash_key_opens: bool,
}

impl KeyUsage {
    /// Whether everything can be opened.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.unreadable == 0 && self.hash_key_opens
    }

    fn add_unreadable(&mut self, id: RequestId, reason: String) {
        self.unreadable += 1;
        if self.examples.len() < LISTED_MAX {
            self.examples.push((id, reason));
        }
    }
}

/// How far a rotation has come.
#[derive(Clone, Debug, Default)]
pub struct RotationProgress {
    /// How often all requests have been gone through, the present time included.
    pub pass: usize,
    /// How many requests were looked at in this pass.
    pub requests: u64,
    /// How many requests were sealed again, in all passes.
    pub resealed: u64,
    /// How many of them were sealed with another key after the first pass: a server still does that.
    pub late: u64,
    /// How many requests have a field that cannot be opened.
    pub unreadable: u64,
    /// The first of them, with the reason.
    pub examples: Vec<(RequestId, String)>,
    /// Whether everything is sealed with the key that encrypts.
    pub is_complete: bool,
}

impl KeyRotation {
    /// The keys that this server has as (name, digest), the one that encrypts first.
    pub fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.keys.names()
    }

    /// Where the keys come from.
    #[must_use]
    pub fn source(&self) -> &str {
        self.keys.source()
    }

    /// Counts the keys in use and opens everything that is sealed.
    /// Fails when the store does not answer.
    pub async fn check(&self, mut progress: impl FnMut(&KeyUsage)) -> Result<KeyUsage> {
        let hash_keys = self.store.hash_keys().await?;
        let mut usage = KeyUsage {
            hash_keys: hash_keys.keys.iter().map(|key| key.name.clone()).collect(),
            hash_key_opens: hash_keys.keys.is_empty()
                || stored_form::open(&self.keys, &hash_keys.keys).is_some(),
            ..KeyUsage::default()
        };
        let newest = self.newest().await?;
        let (mut after, mut reported_at) = (None, Instant::now());
        loop {
            let page = self.page(after, newest).await?;
            let Some(last) = page.last() else { return Ok(usage) };
            after = Some(last.id);
            for names in &page {
                usage.requests += 1;
                count(&mut usage, names);
                // One that is gone by now was purged.
                if let Some(request) = self.store.find_request(names.id).await?
                    && let Err(error) = self.open(&request)
                {
                    usage.add_unreadable(request.id, error);
                }
                if reported_at.elapsed() >= PROGRESS_EVERY {
                    progress(&usage);
                    reported_at = Instant::now();
                }
            }
        }
    }

    /// The last request at the moment. Those that come later are left to the next pass, which might never end otherwise.
    async fn newest(&self) -> Result<Option<RequestId>> {
        Ok(self.store.newest_request().await?.map(|request| request.id))
    }

    /// The next page of requests that are not later than `newest`.
    async fn page(&self, after: Option<RequestId>, newest: Option<RequestId>) -> Result<Vec<SealedNames>> {
        let mut page = self.store.sealed_names(after, PAGE).await?;
        page.retain(|names| newest.is_some_and(|newest| names.id <= newest));
        Ok(page)
    }

    fn open(&self, request: &Request) -> Result<(), String> {
        let because = |field: &str| {
            let field = field.to_owned();
            move |error: OpenError| format!("{field}: {error}")
        };
        let id = request.id;
        self.keys.open(id, SealedField::Payload, &request.payload).map_err(because("payload"))?;
        if let Some(result) = &request.result {
            self.keys.open(id, SealedField::Result, result).map_err(because("result"))?;
        }
        if let Some(failure) = &request.failure {
            let opened = self.keys.open_text(id, SealedField::FailureMessage, &failure.message);
            opened.map_err(because("failure message"))?;
        }
        if let Some(url) = &request.callback_url {
            self.keys.open_text(id, SealedField::CallbackUrl, url).map_err(because("callback URL"))?;
        }
        Ok(())
    }

    /// Seals everything with the key that encrypts, at most `per_second` requests a second.
    /// Fails when the store does not answer; what was sealed until then stays so.
    pub async fn rotate(
        &self,
        per_second: u32,
        mut report: impl FnMut(&RotationProgress),
    ) -> Result<RotationProgress> {
        let own = self.keys.sealing_key().map_err(seal_failed)?;
        self.refuse_reused_name(&own).await?;
        let seals_texts = self.add_own_hash_key().await?;
        // Servers without the key do not start from here on, if they could not read what is sealed with it.
        self.store.register_sealing_key(&own).await?;
        let mut pace = tokio::time::interval(Duration::from_secs(1) / per_second.max(1));
        pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut progress = RotationProgress::default();
        while progress.pass < PASSES_MAX {
            progress.pass += 1;
            (progress.requests, progress.unreadable) = (0, 0);
            progress.examples.clear();
            let foreign = self.pass(&own.name, seals_texts, &mut pace, &mut progress, &mut report).await?;
            if progress.pass > 1 {
                progress.late += foreign;
            }
            if foreign == 0 {
                progress.is_complete = progress.unreadable == 0;
                break;
            }
        }
        if progress.is_complete {
            self.remove_other_hash_keys().await?;
        }
        Ok(progress)
    }

    /// Fails if a key of this name has sealed something and is another one: what it sealed could not be told apart.
    async fn refuse_reused_name(&self, own: &SealingKey) -> Result<()> {
        let registered = self.store.sealing_keys().await?;
        match registered.iter().find(|(key, _)| key.name == own.name && key.digest != own.digest) {
            None => Ok(()),
            Some((other, _)) => Err(Error::failed(
                "request keys",
                ReusedName { name: own.name.clone(), other: other.digest.clone() },
            )),
        }
    }

    /// Seals every request once that needs it. Returns how many of them were sealed with another key, not counting those with
    /// texts that were not sealed at all: a worker that gives up a request writes such a text.
    async fn pass(
        &self,
        name: &str,
        seals_texts: bool,
        pace: &mut tokio::time::Interval,
        progress: &mut RotationProgress,
        report: &mut impl FnMut(&RotationProgress),
    ) -> Result<u64> {
        let mut foreign = 0;
        let newest = self.newest().await?;
        let (mut after, mut reported_at) = (None, Instant::now());
        loop {
            let page = self.page(after, newest).await?;
            let Some(last) = page.last() else { return Ok(foreign) };
            after = Some(last.id);
            for names in &page {
                progress.requests += 1;
                if is_due(names, name, seals_texts) {
                    pace.tick().await;
                    let is_resealed = self.reseal(names.id, name, seals_texts, progress).await?;
                    foreign += u64::from(is_resealed && is_due(names, name, false));
                }
                if reported_at.elapsed() >= PROGRESS_EVERY {
                    report(progress);
                    reported_at = Instant::now();
                }
            }
        }
    }

    async fn reseal(
        &self,
        id: RequestId,
        name: &str,
        seals_texts: bool,
        progress: &mut RotationProgress,
    ) -> Result<bool> {
        // One that is gone by now was purged.
        let Some(request) = self.store.find_request(id).await? else { return Ok(false) };
        match self.sealed_again(&request, name, seals_texts)? {
            Ok(resealed) => {
                self.store.reseal_request(&resealed).await?;
                progress.resealed += 1;
                return Ok(true);
            }
            Err(reason) => {
                progress.unreadable += 1;
                if progress.examples.len() < LISTED_MAX {
                    progress.examples.push((id, reason.to_string()));
                }
            }
        }
        Ok(false)
    }

    /// The fields that are sealed with another key or not sealed, sealed with the key of this name.
    fn sealed_again(
        &self,
        request: &Request,
        name: &str,
        seals_texts: bool,
    ) -> Result<Result<ResealedRequest, OpenError>> {
        let id = request.id;
        let bytes = |field, sealed: &Sealed| -> Result<Result<Option<(Sealed, Sealed)>, OpenError>> {
            if sealed.key_id == name {
                return Ok(Ok(None));
            }
            match self.keys.open(id, field, sealed) {
                Ok(plain) => {
                    let new = self.keys.seal(id, field, &plain).map_err(seal_failed)?;
                    Ok(Ok(Some((sealed.clone(), new))))
                }
                Err(error) => Ok(Err(error)),
            }
        };
        let text = |field, text: &str| -> Result<Result<Option<(String, String)>, OpenError>> {
            if !is_text_due(text, name, seals_texts) {
                return Ok(Ok(None));
            }
            match self.keys.open_text(id, field, text) {
                Ok(plain) => {
                    let new = self.keys.seal_text(id, field, &plain).map_err(seal_failed)?;
                    Ok(Ok(Some((text.to_owned(), new))))
                }
                Err(error) => Ok(Err(error)),
            }
        };
        let payload = bytes(SealedField::Payload, &request.payload)?;
        let result = match &request.result {
            Some(result) => bytes(SealedField::Result, result)?,
            None => Ok(None),
        };
        let failure_message = match &request.failure {
            Some(failure) => text(SealedField::FailureMessage, &failure.message)?,
            None => Ok(None),
        };
        let callback_url = match &request.callback_url {
            Some(url) => text(SealedField::CallbackUrl, url)?,
            None => Ok(None),
        };
        let fields = || -> Result<ResealedRequest, OpenError> {
            Ok(ResealedRequest {
                id,
                payload: payload?,
                result: result?,
                failure_message: failure_message?,
                callback_url: callback_url?,
            })
        };
        Ok(fields())
    }

    /// Stores the key of the hashes sealed with the key that encrypts. Returns whether the hashes have begun, and with them sealed
    /// texts.
    async fn add_own_hash_key(&self) -> Result<bool> {
        let hash_keys = self.store.hash_keys().await?;
        if hash_keys.keys.is_empty() {
            return Ok(false);
        }
        let unknown = || stored_form::UnknownHashKey::new(&self.keys, &hash_keys.keys);
        let key = stored_form::open(&self.keys, &hash_keys.keys)
            .ok_or_else(|| Error::failed("request keys", unknown()))?;
        self.store.add_hash_key(&self.keys.seal_hash_key(&key).map_err(seal_failed)?).await?;
        Ok(hash_keys.has_begun)
    }

    /// Removes the forms of the key of the hashes that are sealed with another key: nothing needs that key any more.
    async fn remove_other_hash_keys(&self) -> Result<()> {
        let own = self.keys.names().next();
        for key in self.store.hash_keys().await?.keys {
            if own != Some((key.name.as_str(), key.digest.as_str())) {
                self.store.remove_hash_key(&key.name, &key.digest).await?;
            }
        }
        Ok(())
    }
}

/// Something is sealed with another key of the name of the key that encrypts.
#[derive(Debug, thiserror::Error)]
#[error(
    "another key named \"{name}\" (digest {other}) has encrypted requests of this store: give the new key a name of its own, and \
     keep the old one behind it"
)]
struct ReusedName {
    name: String,
    other: String,
}

fn seal_failed(error: std::io::Error) -> Error {
    Error::failed("seal", error)
}

fn is_due(names: &SealedNames, name: &str, seals_texts: bool) -> bool {
    let text_is_due =
        |text: &Option<String>| text.as_deref().is_some_and(|text| is_text_due(text, name, seals_texts));
    names.payload != name
        || names.result.as_ref().is_some_and(|result| result != name)
        || text_is_due(&names.failure_message)
        || text_is_due(&names.callback_url)
}

/// Whether a text, or its beginning, is sealed with another key, or not sealed although it should be.
fn is_text_due(text: &str, name: &str, seals_texts: bool) -> bool {
    SealedNames::name_of(text).map_or(seals_texts, |sealed_with| sealed_with != name)
}

fn count(usage: &mut KeyUsage, names: &SealedNames) {
    let texts = [names.failure_message.as_deref(), names.callback_url.as_deref()];
    let sealed_texts = texts.iter().flatten().filter_map(|text| SealedNames::name_of(text));
    let mut all: Vec<&str> =
        sealed_texts.chain([names.payload.as_str()]).chain(names.result.as_deref()).collect();
    all.sort_unstable();
    all.dedup();
    for name in all {
        if usage.used.len() < NAMES_MAX || usage.used.contains_key(name) {
            *usage.used.entry(name.to_owned()).or_default() += 1;
        }
    }
    usage.unsealed += u64::from(texts.iter().flatten().any(|text| SealedNames::name_of(text).is_none()));
}
