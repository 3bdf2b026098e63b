//! Whether a buyer is a person, as a verifier sees it: the protocol that reCAPTCHA, hCaptcha and Turnstile share.
//!
//! The buyer's page gets a token from the verifier and sends it along; this server shows it to the verifier, with a secret,
//! and is told whether it is good and, by some verifiers, how surely. A verifier that does not answer lets nobody through:
//! whoever could make it fail would otherwise get past it.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use serde::Deserialize;
use url::form_urlencoded::Serializer;
use weir_store::{Error, Result};

use super::settings::SaleSettings;
use crate::outbound::{OutboundClient, OutboundLimits, OutboundTarget, Reach};
use crate::telemetry::labels::OutcomeLabels;
use crate::telemetry::metrics::Metrics;

/// The longest token that is shown to the verifier; theirs have at most 2,048 characters.
pub(crate) const TOKEN_MAX: usize = 4_096;

const BOUNDS: OutboundLimits = OutboundLimits {
    connect_timeout: Duration::from_millis(500),
    read_timeout: Duration::from_millis(1_000),
    body_max: 64 * 1024,
    idle_max: 64,
};

/// From this score on a buyer is taken for a person.
const SURE: f64 = 0.7;
/// From this score on a buyer is let through, and counted apart.
const LIKELY: f64 = 0.3;

/// The verifier.
pub struct Challenge {
    client: OutboundClient,
    target: OutboundTarget,
    secret: String,
    outcomes: Family<OutcomeLabels, Counter>,
}

/// What the verifier says.
#[derive(Debug, Deserialize)]
struct Answer {
    success: bool,
    score: Option<f64>,
}

/// What follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// A person.
    Passed,
    /// Perhaps a person: let through, and watched.
    Flagged,
    /// Has to prove it.
    Required,
}

impl Challenge {
    /// The verifier of the settings, if there is one.
    #[must_use]
    pub fn new(settings: &SaleSettings, metrics: &Metrics) -> Option<Self> {
        let target = OutboundTarget::new(settings.challenge.as_ref()?)?;
        let secret = settings.challenge_secret.clone()?;
        let client = OutboundClient::new(Reach::Anywhere, BOUNDS);
        Some(Self { client, target, secret, outcomes: metrics.sale.challenges.clone() })
    }

    /// Judges a buyer by a token. Whoever has none has to get one.
    /// Fails when the verifier cannot say.
    pub async fn judge(&self, token: Option<&str>, address: IpAddr) -> Result<Judgement> {
        let judgement = match token.filter(|token| (1..=TOKEN_MAX).contains(&token.len())) {
            None => Ok(Judgement::Required),
            Some(token) => self.ask(token, address).await.map(judge),
        };
        let outcome = match &judgement {
            Ok(Judgement::Passed) => "passed",
            Ok(Judgement::Flagged) => "flagged",
            Ok(Judgement::Required) => "required",
            Err(_) => "failed",
        };
        self.outcomes.get_or_create(&OutcomeLabels { outcome }).inc();
        judgement
    }

    fn form(&self, token: &str, address: IpAddr) -> Bytes {
        let mut form = Serializer::new(String::new());
        form.append_pair("secret", &self.secret).append_pair("response", token);
        form.append_pair("remoteip", &address.to_string());
        Bytes::from(form.finish())
    }

    async fn ask(&self, token: &str, address: IpAddr) -> Result<Answer> {
        let form_type = HeaderValue::from_static("application/x-www-form-urlencoded");
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, form_type)]);
        let unavailable = |cause: String| Error::unavailable("challenge", cause);
        let answer = self.client.post(&self.target, headers, self.form(token, address)).await;
        let answer = answer.map_err(|problem| unavailable(problem.to_string()))?;
        if !answer.status.is_success() {
            return Err(unavailable(format!("the verifier answered {}", answer.status)));
        }
        serde_json::from_slice(&answer.body).map_err(|error| unavailable(error.to_string()))
    }
}

/// Verifiers without scores only say yes or no.
fn judge(answer: Answer) -> Judgement {
    match answer {
        Answer { success: false, .. } => Judgement::Required,
        Answer { score: None, .. } => Judgement::Passed,
        Answer { score: Some(score), .. } if score >= SURE => Judgement::Passed,
        Answer { score: Some(score), .. } if score >= LIKELY => Judgement::Flagged,
        Answer { .. } => Judgement::Required,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_fall_into_three_bands() {
        let judged = |success, score| judge(Answer { success, score });
        for (score, judgement) in [
            (1.0, Judgement::Passed),
            (0.7, Judgement::Passed),
            (0.699, Judgement::Flagged),
            (0.3, Judgement::Flagged),
            (0.299, Judgement::Required),
            (0.0, Judgement::Required),
            (f64::NAN, Judgement::Required),
        ] {
            assert_eq!(judged(true, Some(score)), judgement, "{score}");
            assert_eq!(judged(false, Some(score)), Judgement::Required);
        }
        assert_eq!(judged(true, None), Judgement::Passed);
    }
}
