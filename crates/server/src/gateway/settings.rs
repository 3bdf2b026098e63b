//! Settings of the AI gateway: the upstream and the bounds on calls to it.

use std::time::Duration;

use http::HeaderValue;
use url::Url;

use crate::settings::parse::{boolean, bytes, count, duration};
use crate::settings::secret::Secret;
use crate::settings::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewaySettings {
    /// `ai.upstream`: the upstream's URL; the built-in echo answers when it is absent.
    pub upstream: Option<Url>,
    /// `ai.authorization`: the `Authorization` header sent in place of the caller's.
    pub authorization: Option<Secret>,
    /// `ai.forward_authorization`: whether the caller's `Authorization` header is forwarded.
    pub forward_authorization: bool,
    /// `ai.trust_forwarded`: whether the caller's forwarding headers, such as `X-Forwarded-For`, are forwarded.
    pub trust_forwarded: bool,
    /// `ai.max_body`: the largest request body, in bytes.
    pub max_body: usize,
    /// `ai.connect_timeout`: how long name look-up, connection and TLS handshake may take together (`outbound/connect.rs`).
    pub connect_timeout: Duration,
    /// `ai.first_byte_timeout`: how long the upstream may take to begin its response, from the end of the request
    /// (`wait_for_response` in `gateway.rs`).
    pub first_byte_timeout: Duration,
    /// `ai.idle_timeout`: how long the upstream may pause within its response (`poll_cut_off` in `upstream.rs`), and a tunnel in
    /// both directions (`tunnel.rs`). Pauses of callers are limited by `http.read_timeout` (`request_body.rs`).
    pub idle_timeout: Duration,
    /// `ai.max_idle`: idle connections to the upstream, an equal part of them for each HTTP thread.
    pub max_idle: usize,
}

impl GatewaySettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let span = "a duration from 1ms to 24h, such as 500ms or 2s";
        let minute = Duration::from_secs(60);
        Ok(Self {
            upstream: reader.get(
                "ai.upstream",
                None,
                upstream,
                "an http:// or https:// URL without a path, such as http://127.0.0.1:9000: paths are passed on as they are",
            )?,
            authorization: reader.get_optional(
                "ai.authorization",
                header,
                "the value of an Authorization header",
            )?,
            forward_authorization: reader.get(
                "ai.forward_authorization",
                false,
                boolean,
                "true or false",
            )?,
            trust_forwarded: reader.get("ai.trust_forwarded", false, boolean, "true or false")?,
            max_body: reader.get(
                "ai.max_body",
                32 << 20,
                bytes,
                "a size in bytes such as 65536, 64KiB or 1MiB",
            )?,
            connect_timeout: reader.get("ai.connect_timeout", Duration::from_secs(2), duration, span)?,
            first_byte_timeout: reader.get("ai.first_byte_timeout", minute, duration, span)?,
            idle_timeout: reader.get("ai.idle_timeout", minute, duration, span)?,
            max_idle: reader.get("ai.max_idle", 256, count(100_000), "a number from 1 to 100000")?,
        })
    }
}

fn upstream(text: &str) -> Option<Option<Url>> {
    if text.is_empty() {
        return Some(None);
    }
    let url: Url = text.trim().parse().ok()?;
    let is_bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
    (matches!(url.scheme(), "http" | "https") && url.has_host() && is_bare).then_some(Some(url))
}

fn header(text: &str) -> Option<Secret> {
    (!text.is_empty() && HeaderValue::from_str(text).is_ok()).then(|| Secret(text.to_owned()))
}
