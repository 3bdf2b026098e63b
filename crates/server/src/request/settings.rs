//! Settings of request: acceptance, downstreams, retries, encryption and webhooks.

mod downstream;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use weir_core::quota::QuotaLimits;
use weir_core::request::canary::Percent;
use weir_core::request::retry::{RetryBackoff, RetryPolicy};
use weir_core::{RequestType, webhook};
use weir_store::request::{Rollout, TenantRule, TenantRules};

pub(crate) use self::downstream::DownstreamSettings;
use crate::settings::parse::{boolean, count, duration};
use crate::settings::secret::Secret;
use crate::settings::source::{SettingError, SettingsReader};

/// The longest retention.
const RETENTION_DAYS_MAX: usize = 3_650;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSettings {
    /// `request.processing.enabled`, `request.reconciler.enabled`, `request.canary.percent`: until an operator changes them.
    pub rollout: Rollout,
    /// `request.tenant_limit`: new requests of a tenant per minute; `None` means no limit.
    pub tenant_limit: Option<QuotaLimits>,
    /// `request.max_attempts`, `request.backoff.first`, `request.backoff.max`, `request.lease`, `request.callback_within`.
    pub policy: RetryPolicy,
    /// `request.concurrency`: concurrent calls to downstreams of one process.
    pub concurrency: usize,
    /// `[request.tenants.<name>]`, `request.tenant_concurrency`: what tenants get in their turns, and how many calls at once.
    pub tenants: Arc<TenantRules>,
    /// `downstream`, its timeouts and `request.sslrootcert`: called for types without a downstream of their own.
    pub downstream: DownstreamSettings,
    /// `[request.downstreams.<name>]`: called for requests of its types.
    pub downstreams: BTreeMap<String, DownstreamSettings>,
    /// The name of the downstream for types that no other has.
    pub rest: String,
    /// `request.keys`: keys that encrypt payloads; one is generated if absent.
    pub keys: Option<Secret>,
    /// `keys.command`: a command that writes the same.
    pub keys_command: Option<String>,
    /// `request.keys_file`: the same in a file.
    pub keys_file: Option<PathBuf>,
    /// `webhook_secret`: signs webhooks and verifies callbacks; generated if absent.
    pub webhook_secret: Option<Secret>,
    /// `request.webhook.allow_private`: whether callback URLs may lead to private and loopback addresses.
    pub allow_private: bool,
    /// `request.webhook.timeout`: how long a webhook's receiver may take to answer.
    pub webhook_timeout: Duration,
    /// `request.sensitive_fields`: payload fields that are redacted for operators.
    pub sensitive_fields: Vec<String>,
    /// `request.retention_days`: how long requests are stored.
    pub retention: Duration,
}

/// How much of a lease must be left after the longest call, to report it.
const LEASE_MARGIN: Duration = Duration::from_secs(1);

const SPAN: &str = "a duration from 1ms to 24h, such as 500ms or 2s";

impl RequestSettings {
    /// The name of the default downstream. No request type has the empty name.
    pub const DEFAULT_DOWNSTREAM: &str = "";

    /// The name of the downstream for a request type: the one that lists it, the one of its name that lists none, or the one
    /// that takes the rest.
    #[must_use]
    pub fn downstream_name(&self, request_type: &RequestType) -> &str {
        let name = request_type.as_str();
        let has_type =
            |of: &DownstreamSettings| of.types.as_ref().is_some_and(|types| types.iter().any(|t| t == name));
        let listed = self.downstreams.iter().find(|(_, of)| has_type(of)).map(|(name, _)| name.as_str());
        let named = || self.downstreams.get_key_value(name).filter(|(_, of)| of.types.is_none());
        listed.or_else(|| named().map(|(name, _)| name.as_str())).unwrap_or(&self.rest)
    }

    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let path = |text: &str| Some((!text.is_empty()).then(|| PathBuf::from(text)));
        let command = |text: &str| Some((!text.trim().is_empty()).then(|| text.to_owned()));
        let secret = |text: &str| (!text.is_empty()).then(|| Secret(text.to_owned()));
        let downstream = DownstreamSettings::read_default(reader)?;
        let downstreams = downstream::read_tables(reader, &downstream)?;
        let rest = downstream::takes_the_rest(&downstream, &downstreams).to_owned();
        let policy = read_policy(reader)?;
        check_lease(policy.lease, &downstream, &downstreams)?;
        let days = "a number of days from 1 to 3650";
        Ok(Self {
            rollout: read_rollout(reader)?,
            tenant_limit: reader.get(
                "request.tenant_limit",
                None,
                per_minute,
                "a number from 0 to 2147483647",
            )?,
            policy,
            concurrency: reader.get("request.concurrency", 256, count(10_000), "a number from 1 to 10000")?,
            tenants: Arc::new(read_tenants(reader)?),
            downstream,
            downstreams,
            rest,
            keys: reader.get_optional("request.keys", secret, "a list such as 2026b:BASE64,2026a:BASE64")?,
            keys_command: reader
                .get_optional("keys.command", command, "a command line, or empty for none")?
                .flatten(),
            keys_file: reader.get("request.keys_file", None, path, "the path of a file")?,
            webhook_secret: reader.get_optional(
                "webhook_secret",
                |text| is_webhook_secret(text).then(|| Secret(text.to_owned())),
                WEBHOOK_SECRET,
            )?,
            allow_private: reader.get("request.webhook.allow_private", false, boolean, "true or false")?,
            webhook_timeout: reader.get("request.webhook.timeout", Duration::from_secs(5), duration, SPAN)?,
            sensitive_fields: reader.get("request.sensitive_fields", Vec::new(), names, "a list of names")?,
            retention: reader
                .get("request.retention_days", 90, count(RETENTION_DAYS_MAX), days)
                .map(|days| Duration::from_secs(days as u64 * 86_400))?,
        })
    }
}

/// The format of webhook secrets, for error messages.
pub(crate) const WEBHOOK_SECRET: &str = "whsec_ and 24 to 64 bytes in base64; up to three older ones that are still good may \
                                  follow, with spaces between them";
const WEBHOOK_SECRETS_MAX: usize = 4;

/// Whether a text is one or several webhook secrets.
#[must_use]
pub(crate) fn is_webhook_secret(text: &str) -> bool {
    let secrets = text.split_whitespace();
    let count = secrets.clone().count();
    (1..=WEBHOOK_SECRETS_MAX).contains(&count)
        && secrets.map(webhook::SigningSecret::parse).all(|secret| secret.is_ok())
}

/// The largest weight: between two turns of a tenant every other may have this many jobs.
const WEIGHT_MAX: u32 = 100;
const WEIGHT: &str = "a number from 1 to 100";
const CONCURRENCY: &str = "a number from 1 to 10000";

fn read_tenants(reader: &mut SettingsReader) -> Result<TenantRules, SettingError> {
    let concurrency = |text: &str| match text.trim() {
        "0" => Some(None),
        text => count(10_000)(text).map(Some),
    };
    let default = TenantRule {
        weight: NonZeroU32::MIN,
        concurrency: reader.get(
            "request.tenant_concurrency",
            None,
            concurrency,
            "a number from 0 to 10000",
        )?,
    };
    let mut named = HashMap::new();
    for (name, fields) in reader.tables("request.tenants") {
        let mut rule = default;
        for (field, text) in &fields {
            let wrong = |allowed| SettingError::new(format!("request.tenants.{name}.{field}"), text, allowed);
            match field.as_str() {
                "weight" => {
                    let weight =
                        text.trim().parse().ok().filter(|weight: &NonZeroU32| weight.get() <= WEIGHT_MAX);
                    rule.weight = weight.ok_or_else(|| wrong(WEIGHT))?;
                }
                "concurrency" => {
                    rule.concurrency = Some(count(10_000)(text).ok_or_else(|| wrong(CONCURRENCY))?);
                }
                _ => return Err(wrong("left out: a tenant has weight and concurrency")),
            }
        }
        named.insert(name, rule);
    }
    Ok(TenantRules { default, named })
}

fn read_rollout(reader: &mut SettingsReader) -> Result<Rollout, SettingError> {
    let percent = |text: &str| text.trim().parse().ok().and_then(|percent| Percent::new(percent).ok());
    Ok(Rollout {
        // Only operators switch it, while the server runs.
        accepting_enabled: true,
        processing_enabled: reader.get("request.processing.enabled", true, boolean, "true or false")?,
        reconciler_enabled: reader.get("request.reconciler.enabled", true, boolean, "true or false")?,
        canary: reader.get("request.canary.percent", Percent::ALL, percent, "a number from 0 to 100")?,
    })
}

fn read_policy(reader: &mut SettingsReader) -> Result<RetryPolicy, SettingError> {
    let default = RetryPolicy::default();
    let attempts = |text: &str| text.trim().parse::<NonZeroU32>().ok().filter(|count| count.get() <= 100);
    let first = reader.get("request.backoff.first", Duration::from_millis(200), duration, SPAN)?;
    let longest = reader.get("request.backoff.max", Duration::from_secs(30), duration, SPAN)?;
    let backoff = RetryBackoff::new(first, longest).map_err(|_not_a_range| {
        SettingError::new("request.backoff.first", format!("{first:?}"), "at most request.backoff.max")
    })?;
    Ok(RetryPolicy {
        max_attempts: reader.get(
            "request.max_attempts",
            default.max_attempts,
            attempts,
            "a number from 1 to 100",
        )?,
        backoff,
        lease: reader.get("request.lease", default.lease, duration, SPAN)?,
        callback_within: reader.get("request.callback_within", default.callback_within, duration, SPAN)?,
    })
}

/// A call must end within its lease, or another worker would make it again meanwhile.
fn check_lease(
    lease: Duration,
    default: &DownstreamSettings,
    others: &BTreeMap<String, DownstreamSettings>,
) -> Result<(), SettingError> {
    for downstream in std::iter::once(default).chain(others.values()) {
        let call = downstream.connect_timeout + downstream.read_timeout;
        if call + LEASE_MARGIN > lease {
            let allowed =
                format!("at least {LEASE_MARGIN:?} longer than a call to a downstream may take ({call:?})");
            return Err(SettingError::new("request.lease", format!("{lease:?}"), allowed));
        }
    }
    Ok(())
}

/// A limit per minute; 0 means no limit.
fn per_minute(text: &str) -> Option<Option<QuotaLimits>> {
    match text.trim().parse().ok()? {
        0 => Some(None),
        limit => QuotaLimits::new(limit, 1).ok().map(Some),
    }
}

fn names(text: &str) -> Option<Vec<String>> {
    Some(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
}
