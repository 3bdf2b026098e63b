//! Which dead letters an operator means: by topic, tenant, type, error, and when they died.

use serde::Deserialize;
use utoipa::IntoParams;
use weir_core::Timestamp;
use weir_queue::DeadLetter;
use weir_store::request::{DeadRequest, Request};

use crate::http::error::ApiError;
use crate::http::openapi::schema;

/// The fields of a filter as they come. A dead letter has to match all that are given.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default)]
pub(crate) struct FilterFields {
    /// The topic of messages, such as `sms-outbound` or `request-webhooks`; `requests` for requests.
    #[param(required = false)]
    pub(super) topic: Option<String>,
    /// The tenant of requests, and of their webhooks. Other messages have none.
    #[param(required = false)]
    pub(super) tenant: Option<String>,
    /// The type of requests, and of those of webhooks.
    #[serde(rename = "type")]
    #[param(required = false)]
    pub(super) request_type: Option<String>,
    /// The `failureCode` of requests; a part of the `reason` of messages.
    #[param(required = false)]
    pub(super) error: Option<String>,
    /// Those that died at this time or later.
    #[param(value_type = schema::Time, required = false)]
    pub(super) since: Option<String>,
    /// Those that died before this time.
    #[param(value_type = schema::Time, required = false)]
    pub(super) until: Option<String>,
}

impl FilterFields {
    pub(super) fn parse(self) -> Result<DeadLetterFilter, ApiError> {
        let Self { topic, tenant, request_type, error, since, until } = self;
        let time = |field, text: Option<String>| text.map(|text| parse_time(field, &text)).transpose();
        let (since, until) = (time("since", since)?, time("until", until)?);
        Ok(DeadLetterFilter { topic, tenant, request_type, error, since, until })
    }
}

fn parse_time(field: &str, text: &str) -> Result<Timestamp, ApiError> {
    let time: Result<jiff::Timestamp, _> = text.parse();
    let time = time.map_err(|_not_a_time| {
        ApiError::invalid_field(field, "must be an RFC 3339 time, such as 2026-06-01T12:00:00Z")
    })?;
    Ok(Timestamp::from_micros(time.as_microsecond()))
}

#[derive(Debug, Default)]
pub(super) struct DeadLetterFilter {
    topic: Option<String>,
    tenant: Option<String>,
    request_type: Option<String>,
    error: Option<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
}

impl DeadLetterFilter {
    /// Whether every dead letter matches.
    pub(super) const fn is_empty(&self) -> bool {
        let Self { topic, tenant, request_type, error, since, until } = self;
        topic.is_none()
            && tenant.is_none()
            && request_type.is_none()
            && error.is_none()
            && since.is_none()
            && until.is_none()
    }

    pub(super) fn includes_topic(&self, topic: &str) -> bool {
        self.topic.as_ref().is_none_or(|wanted| wanted == topic)
    }

    pub(super) fn matches_request(&self, dead: &DeadRequest) -> bool {
        let code = dead.request.failure.as_ref().map(|failure| failure.code.as_str());
        let has_error = self.error.as_deref().is_none_or(|error| code == Some(error));
        has_error && self.is_in_time(dead.died_at) && self.is_of(Some(&dead.request))
    }

    /// `request` is the request that the message is about, if it is a webhook.
    pub(super) fn matches_message(&self, letter: &DeadLetter, request: Option<&Request>) -> bool {
        let has_error = self.error.as_ref().is_none_or(|error| letter.reason.contains(error.as_str()));
        has_error
            && self.includes_topic(&letter.topic)
            && self.is_in_time(letter.died_at)
            && self.is_of(request)
    }

    /// Whether it depends on the request that a message is about.
    pub(super) const fn needs_request(&self) -> bool {
        self.tenant.is_some() || self.request_type.is_some()
    }

    fn is_of(&self, request: Option<&Request>) -> bool {
        let has = |wanted: &Option<String>, of: fn(&Request) -> &str| {
            wanted.as_ref().is_none_or(|wanted| request.is_some_and(|request| of(request) == wanted))
        };
        has(&self.tenant, |request| request.tenant.as_str())
            && has(&self.request_type, |request| request.request_type.as_str())
    }

    fn is_in_time(&self, died_at: Timestamp) -> bool {
        self.since.is_none_or(|since| since <= died_at) && self.until.is_none_or(|until| died_at < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(topic: &str, died_at: i64) -> DeadLetter {
        DeadLetter {
            id: "1".to_owned(),
            topic: topic.to_owned(),
            key: "k".to_owned(),
            payload: Vec::new(),
            reason: "the receiver answered 410".to_owned(),
            attempts: 1,
            died_at: Timestamp::from_seconds(died_at),
        }
    }

    fn filter(fields: serde_json::Value) -> DeadLetterFilter {
        serde_json::from_value::<FilterFields>(fields).unwrap().parse().ok().unwrap()
    }

    #[test]
    fn a_message_matches_if_it_has_all_that_is_given() {
        let letter = letter("request-webhooks", 60);
        for (fields, expected) in [
            (serde_json::json!({}), true),
            (serde_json::json!({"topic": "request-webhooks", "error": "410"}), true),
            (serde_json::json!({"topic": "request-webhooks", "error": "411"}), false),
            (serde_json::json!({"topic": "requests"}), false),
            (serde_json::json!({"since": "1970-01-01T00:01:00Z"}), true),
            (serde_json::json!({"since": "1970-01-01T00:01:00.000001Z"}), false),
            (serde_json::json!({"until": "1970-01-01T00:01:00Z"}), false),
            (serde_json::json!({"until": "1970-01-01T00:01:01Z"}), true),
            (serde_json::json!({"tenant": "acme"}), false),
            (serde_json::json!({"type": "payment"}), false),
        ] {
            assert_eq!(filter(fields.clone()).matches_message(&letter, None), expected, "{fields}");
        }
        assert!(filter(serde_json::json!({})).is_empty());
        assert!(!filter(serde_json::json!({"type": "x"})).is_empty());
    }
}
