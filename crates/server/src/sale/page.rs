//! The sale page among the files of `http/page_files.rs`, and the policy that the shopper's page runs under. Where buyers face a challenge or are named by tokens, the shopper's page is told so in a `<meta>` tag.

use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;

use super::settings::challenge::ChallengeSettings;
use super::settings::{BuyerIdentity, SaleSettings};
use crate::http::page_files::{self, FILES, NO_REFERRER, POLICY};

/// The page that shoppers see.
const INDEX: &str = "index.html";
const MISSING: &str = include_str!("../../assets/no-sale-page.html");

/// Providers compare the site that asks for a token with those that its key is for.
const SITE_AS_REFERRER: &str = "strict-origin";

/// The page as these settings make it.
#[derive(Debug)]
pub(crate) struct SalePage {
    /// The shopper's page; `None` if the binary was built without it.
    index: Option<Bytes>,
    index_policy: String,
    index_referrer: &'static str,
}

/// What the page is told.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PageSettings<'a> {
    identity: &'static str,
    challenge: Option<PageChallenge<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PageChallenge<'a> {
    provider: &'static str,
    site_key: &'a str,
    interactive_site_key: Option<&'a str>,
    script_url: &'a str,
}

impl SalePage {
    pub(crate) fn new(settings: &SaleSettings) -> Self {
        let challenge = settings.challenge.as_ref();
        let (_, html) = FILES.iter().find(|(name, _)| *name == INDEX).copied().unzip();
        Self {
            index: html.map(|html| insert_settings(html, settings)),
            index_policy: challenge.map_or_else(|| POLICY.to_owned(), policy),
            index_referrer: if challenge.is_some() { SITE_AS_REFERRER } else { NO_REFERRER },
        }
    }

    /// The response with the shopper's page, or with one that says how to build it.
    pub(crate) fn index(&self) -> Response {
        let content = self.index.clone().unwrap_or(Bytes::from_static(MISSING.as_bytes()));
        page_files::html_under(content, &self.index_policy, self.index_referrer)
    }

    /// The response with a file; `None` if there is none of exactly that name.
    pub(crate) fn file(&self, name: &str) -> Option<Response> {
        if name == INDEX { self.index.is_some().then(|| self.index()) } else { page_files::find(name) }
    }
}

/// Everything is loaded from this server and from the provider. Providers do not say that their scripts work with trusted types,
/// so those are not required here.
fn policy(challenge: &ChallengeSettings) -> String {
    let provider = challenge.sources();
    format!(
        "default-src 'none'; script-src 'self' {provider}; style-src 'self' {provider}; img-src 'self' {provider}; \
         connect-src 'self' {provider}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; frame-src {provider}"
    )
}

/// Adds the settings to the page's head, unless the page needs none.
fn insert_settings(html: &'static [u8], settings: &SaleSettings) -> Bytes {
    let challenge = settings.challenge.as_ref().map(|challenge| PageChallenge {
        provider: challenge.provider.as_str(),
        site_key: &challenge.keys.site_key,
        interactive_site_key: challenge.interactive_keys.as_ref().map(|keys| keys.site_key.as_str()),
        script_url: challenge.script_url.as_str(),
    });
    if challenge.is_none() && settings.identity == BuyerIdentity::Header {
        return Bytes::from_static(html);
    }
    let identity = match settings.identity {
        BuyerIdentity::Header => "header",
        BuyerIdentity::Token => "token",
    };
    // Text and `Option`s always become JSON.
    let json = serde_json::to_string(&PageSettings { identity, challenge }).unwrap_or_default();
    let tag = format!("<meta name=\"weir-sale\" content=\"{}\" />\n  </head>", escape(&json));
    Bytes::from(String::from_utf8_lossy(html).replacen("</head>", &tag, 1))
}

/// Escapes text for an attribute in double quotes.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use http::header::CONTENT_SECURITY_POLICY;
    use url::Url;

    use super::super::settings::challenge::{KeyPair, Provider};
    use super::*;
    use crate::settings::secret::Secret;

    fn settings(provider: Option<Provider>, script_url: &str) -> SaleSettings {
        let keys = KeyPair { site_key: "\"><script>".to_owned(), secret: Secret("s3cret".to_owned()) };
        let challenge = provider.map(|provider| ChallengeSettings {
            provider,
            keys,
            interactive_keys: None,
            verify_url: Url::parse("https://verifier.example/").unwrap(),
            script_url: Url::parse(script_url).unwrap(),
        });
        SaleSettings {
            user_per_second: 1,
            identity: BuyerIdentity::Header,
            challenge,
            log_attempts: false,
            allow_reset: false,
        }
    }

    #[test]
    fn the_policy_is_opened_for_the_provider_alone_and_on_the_shoppers_page_alone() {
        let turnstile = "https://challenges.cloudflare.com/turnstile/v0/api.js?render=explicit";
        let page = SalePage::new(&settings(Some(Provider::Turnstile), turnstile));
        let policy = &page.index_policy;
        for directive in ["script-src 'self'", "frame-src", "connect-src 'self'"] {
            assert!(
                policy.contains(&format!("{directive} https://challenges.cloudflare.com;"))
                    || policy.ends_with("frame-src https://challenges.cloudflare.com"),
                "{policy}"
            );
        }
        assert_eq!(
            policy.matches("https://").count(),
            policy.matches("https://challenges.cloudflare.com").count()
        );
        assert!(policy.starts_with("default-src 'none'; ") && !policy.contains("unsafe"), "{policy}");
        let without = SalePage::new(&settings(None, turnstile));
        assert_eq!(without.index_policy, POLICY);
        assert!(POLICY.contains("require-trusted-types-for 'script'"));
        let Some(of_operators) = page.file("admin.html") else { return };
        assert_eq!(of_operators.headers()[CONTENT_SECURITY_POLICY], POLICY, "it needs no provider");
    }

    #[test]
    fn a_script_from_elsewhere_is_allowed_by_its_origin() {
        let page =
            SalePage::new(&settings(Some(Provider::ReCaptcha), "https://www.recaptcha.net/recaptcha/api.js"));
        assert!(page.index_policy.contains("https://www.gstatic.com/recaptcha/"));
        assert!(page.index_policy.contains(" https://www.recaptcha.net;"), "{}", page.index_policy);
    }

    #[test]
    fn settings_cannot_leave_the_attribute_and_show_no_secret() {
        let settings = settings(Some(Provider::HCaptcha), "https://js.hcaptcha.com/1/api.js");
        let html = insert_settings(b"<head></head><body>", &settings);
        let html = String::from_utf8(html.to_vec()).unwrap();
        assert!(html.contains(r"&quot;siteKey&quot;:&quot;\&quot;&gt;&lt;script&gt;&quot;"), "{html}");
        assert!(!html.contains("<script") && !html.contains("s3cret"), "{html}");
    }
}
