//! Asks a verifier whether a buyer is a person, in the protocol that reCAPTCHA, hCaptcha and Turnstile share.
//!
//! The buyer's page gets a token from the verifier and sends it along. This server sends the token and a secret to the
//! verifier, which responds whether the token is valid and, some verifiers, with a score. While the verifier does not
//! respond, nobody is let through: otherwise anybody who can make it fail could bypass it.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use serde::Deserialize;
use url::form_urlencoded::Serializer;
use utoipa::ToSchema;
use weir_core::UserId;
use weir_store::{Error, Result};

use super::events::BuyerFlagged;
use super::metrics::SaleMetrics;
use super::settings::SaleSettings;
use super::settings::challenge::Provider;
use crate::outbound::{OutboundClient, OutboundLimits, OutboundTarget, Reach};

/// The longest token that is sent to the verifier. Known verifiers issue at most 2,048 characters.
pub(crate) const TOKEN_MAX: usize = 4_096;

const BOUNDS: OutboundLimits = OutboundLimits {
    connect_timeout: Duration::from_millis(500),
    read_timeout: Duration::from_millis(1_000),
    body_max: 64 * 1024,
    idle_max: 64,
};

/// The lowest score with which a buyer passes.
const PASSED_MIN: f64 = 0.7;
/// The lowest score with which a buyer is let through but flagged.
const FLAGGED_MIN: f64 = 0.3;

pub struct Challenge {
    client: OutboundClient,
    target: OutboundTarget,
    provider: Provider,
    secret: String,
    /// The secret for tokens of the interactive challenge, if that has keys of its own.
    interactive_secret: Option<String>,
    metrics: SaleMetrics,
}

/// What a buyer has sent: the provider's token, and the challenge that it is from.
#[derive(Clone, Copy, Debug)]
pub struct ChallengeToken<'a> {
    pub token: &'a str,
    pub kind: ChallengeKind,
}

/// The two challenges of a provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChallengeKind {
    #[default]
    Invisible,
    Interactive,
}

#[derive(Debug, Deserialize)]
struct VerifierResponse {
    success: bool,
    score: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChallengeOutcome {
    /// The buyer is a person.
    Passed,
    /// The buyer may be a person: let through, but logged.
    Flagged,
    /// The buyer has to solve a challenge first.
    Required,
}

impl Challenge {
    /// Returns `None` if no verifier is configured.
    #[must_use]
    pub fn new(settings: &SaleSettings, metrics: &SaleMetrics) -> Option<Self> {
        let settings = settings.challenge.as_ref()?;
        Some(Self {
            client: OutboundClient::new(Reach::Anywhere, BOUNDS),
            target: OutboundTarget::new(&settings.verify_url)?,
            provider: settings.provider,
            secret: settings.keys.secret.0.clone(),
            interactive_secret: settings.interactive_keys.as_ref().map(|keys| keys.secret.0.clone()),
            metrics: metrics.clone(),
        })
    }

    /// Checks a buyer's token. Without one, a challenge is required. Fails when the verifier is unavailable.
    pub async fn check(
        &self,
        buyer: &UserId,
        token: Option<ChallengeToken<'_>>,
        address: IpAddr,
    ) -> Result<ChallengeOutcome> {
        let outcome = match token.filter(|token| (1..=TOKEN_MAX).contains(&token.token.len())) {
            None => Ok(ChallengeOutcome::Required),
            Some(token) => {
                self.verify(token, address).await.map(|response| evaluate(self.provider, response))
            }
        };
        match &outcome {
            Ok(ChallengeOutcome::Passed) => self.metrics.record_challenge("passed"),
            Ok(ChallengeOutcome::Flagged) => BuyerFlagged { buyer, address }.emit(&self.metrics),
            Ok(ChallengeOutcome::Required) => self.metrics.record_challenge("required"),
            Err(_) => self.metrics.record_challenge("failed"),
        }
        outcome
    }

    fn form(&self, ChallengeToken { token, kind }: ChallengeToken<'_>, address: IpAddr) -> Bytes {
        let interactive_secret = self.interactive_secret.as_ref();
        let own_secret = interactive_secret.filter(|_| kind == ChallengeKind::Interactive);
        let mut form = Serializer::new(String::new());
        form.append_pair("secret", own_secret.unwrap_or(&self.secret)).append_pair("response", token);
        form.append_pair("remoteip", &address.to_string());
        Bytes::from(form.finish())
    }

    async fn verify(&self, token: ChallengeToken<'_>, address: IpAddr) -> Result<VerifierResponse> {
        let form_type = HeaderValue::from_static("application/x-www-form-urlencoded");
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, form_type)]);
        let unavailable = |cause: String| Error::unavailable("challenge", cause);
        let response = self.client.post(&self.target, headers, self.form(token, address)).await;
        let response = response.map_err(|problem| unavailable(problem.to_string()))?;
        if !response.status.is_success() {
            return Err(unavailable(format!("the verifier responded {}", response.status)));
        }
        serde_json::from_slice(&response.body).map_err(|error| unavailable(error.to_string()))
    }
}

/// A response without a score passes if it is a success. hCaptcha's score is the risk, that of others the opposite.
fn evaluate(provider: Provider, response: VerifierResponse) -> ChallengeOutcome {
    let score = match provider {
        Provider::HCaptcha => response.score.map(|risk| 1.0 - risk),
        Provider::Turnstile | Provider::ReCaptcha => response.score,
    };
    match score {
        _ if !response.success => ChallengeOutcome::Required,
        None => ChallengeOutcome::Passed,
        Some(score) if score >= PASSED_MIN => ChallengeOutcome::Passed,
        Some(score) if score >= FLAGGED_MIN => ChallengeOutcome::Flagged,
        Some(_) => ChallengeOutcome::Required,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_map_to_three_outcomes() {
        let outcome = |success, score| evaluate(Provider::ReCaptcha, VerifierResponse { success, score });
        for (score, expected) in [
            (1.0, ChallengeOutcome::Passed),
            (0.7, ChallengeOutcome::Passed),
            (0.699, ChallengeOutcome::Flagged),
            (0.3, ChallengeOutcome::Flagged),
            (0.299, ChallengeOutcome::Required),
            (0.0, ChallengeOutcome::Required),
            (f64::NAN, ChallengeOutcome::Required),
        ] {
            assert_eq!(outcome(true, Some(score)), expected, "{score}");
            assert_eq!(outcome(false, Some(score)), ChallengeOutcome::Required);
        }
        assert_eq!(outcome(true, None), ChallengeOutcome::Passed);
    }

    #[test]
    fn a_score_of_hcaptcha_is_a_risk() {
        let outcome =
            |score| evaluate(Provider::HCaptcha, VerifierResponse { success: true, score: Some(score) });
        let outcomes = [0.0, 0.25, 0.5, 0.75, 1.0].map(outcome);
        let [passed, flagged, required] =
            [ChallengeOutcome::Passed, ChallengeOutcome::Flagged, ChallengeOutcome::Required];
        assert_eq!(outcomes, [passed, passed, flagged, required, required]);
    }
}
