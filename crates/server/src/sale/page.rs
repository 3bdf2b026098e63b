//! The files of the sale page, embedded in the binary if they existed when it was built, and the policy that they run under.
//! Where buyers face a challenge or are named by tokens, the shopper's page is told so in a `<meta>` tag.

use bytes::Bytes;
use serde::Serialize;

use super::settings::challenge::ChallengeSettings;
use super::settings::{BuyerIdentity, SaleSettings};

/// Paths below `web/dist`, and contents, in order of path.
pub(super) const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/page.rs"));
/// The page that shoppers see.
pub(super) const INDEX: &str = "index.html";
const MISSING: &str = include_str!("../../assets/no-sale-page.html");

/// Nobody learns from where the page was opened.
const NO_REFERRER: &str = "no-referrer";
/// Providers compare the site that asks for a token with those that its key is for.
const SITE_AS_REFERRER: &str = "strict-origin";

/// The page as these settings make it.
#[derive(Debug)]
pub(crate) struct SalePage {
    /// The shopper's page; `None` if the binary was built without it.
    index: Option<Bytes>,
    policy: String,
    index_policy: String,
    index_referrer: &'static str,
}

/// A file and the headers that depend on the settings.
#[derive(Debug)]
pub(crate) struct PageFile<'a> {
    pub(crate) name: &'static str,
    pub(crate) content: Bytes,
    pub(crate) policy: &'a str,
    pub(crate) referrer: &'static str,
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
            policy: policy(None),
            index_policy: policy(challenge),
            index_referrer: if challenge.is_some() { SITE_AS_REFERRER } else { NO_REFERRER },
        }
    }

    /// Returns the shopper's page, or one that says how to build it.
    pub(crate) fn index(&self) -> PageFile<'_> {
        let content = self.index.clone().unwrap_or(Bytes::from_static(MISSING.as_bytes()));
        PageFile { name: INDEX, content, policy: &self.index_policy, referrer: self.index_referrer }
    }

    /// Returns a file by its exact path.
    pub(crate) fn file(&self, name: &str) -> Option<PageFile<'_>> {
        let index = FILES.binary_search_by_key(&name, |(name, _)| name).ok()?;
        let &(name, content) = FILES.get(index)?;
        if name == INDEX {
            return Some(self.index());
        }
        let content = Bytes::from_static(content);
        Some(PageFile { name, content, policy: &self.policy, referrer: NO_REFERRER })
    }
}

/// Everything is loaded from this server and, with a challenge, from its provider. Providers do not say that their scripts work
/// with trusted types, so those are required without a challenge only.
fn policy(challenge: Option<&ChallengeSettings>) -> String {
    let provider = challenge.map(|challenge| format!(" {}", challenge.sources())).unwrap_or_default();
    let last = match challenge {
        Some(_) => format!("; frame-src{provider}"),
        None => "; require-trusted-types-for 'script'".to_owned(),
    };
    format!(
        "default-src 'none'; script-src 'self'{provider}; style-src 'self'{provider}; img-src 'self'{provider}; \
         connect-src 'self'{provider}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{last}"
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
        assert!(!page.policy.contains("https://"), "the operator's page needs no provider");
        let without = SalePage::new(&settings(None, turnstile));
        assert_eq!(without.index_policy, without.policy);
        assert!(without.policy.contains("require-trusted-types-for 'script'"));
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

    #[test]
    fn files_are_found_only_by_their_exact_names() {
        let page = SalePage::new(&settings(None, "https://a.example/"));
        assert!(FILES.is_sorted_by_key(|(name, _)| name));
        for (name, content) in FILES {
            assert_eq!(page.file(name).unwrap().content, *content);
        }
        for other in ["", "../Cargo.toml", "assets/", "assets/../index.html", "/index.html", "INDEX.HTML"] {
            assert!(page.file(other).is_none(), "{other}");
        }
    }
}
