//! The `callbackUrl` of a submission. A literal address that is not public is refused here; a name that resolves to one is
//! refused when the webhook is sent.

use url::{Host, Url};

use crate::http::error::ApiError;
use crate::outbound::address::is_public;

/// The longest URL, in bytes.
const LENGTH_MAX: usize = 2_048;

/// Validates a `callbackUrl` and returns it in normal form.
/// Fails if it is not an `http` or `https` URL, contains credentials, or leads into a private network.
pub(super) fn parse(text: &str, allow_private: bool) -> Result<String, ApiError> {
    let refuse = |problem: &str| Err(ApiError::invalid_field("callbackUrl", problem));
    if text.len() > LENGTH_MAX {
        return refuse("must have at most 2048 bytes");
    }
    let url = text.parse::<Url>().ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    let Some((url, host)) = url.as_ref().and_then(|url| Some((url, url.host()?))) else {
        return refuse("must be an http:// or https:// URL");
    };
    if !url.username().is_empty() || url.password().is_some() {
        return refuse("must not contain a user or a password: what is sent there is signed");
    }
    if !allow_private && !may_be_public(&host) {
        return refuse("must not lead to a private or loopback address");
    }
    if url.as_str().len() > LENGTH_MAX {
        return refuse("must have at most 2048 bytes, with its characters encoded");
    }
    Ok(url.as_str().to_owned())
}

fn may_be_public(host: &Host<&str>) -> bool {
    match host {
        Host::Ipv4(address) => is_public((*address).into()),
        Host::Ipv6(address) => is_public((*address).into()),
        Host::Domain(name) => {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            name != "localhost" && !name.ends_with(".localhost")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_urls_that_may_be_public_are_accepted() {
        for good in ["https://example.com/hook?a=b", "http://8.8.8.8:8080/", "https://[2606:4700::1111]/"] {
            assert_eq!(parse(good, false).ok().as_deref(), Some(good));
        }
        for private in [
            "http://127.0.0.1/",
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f.0.0.1/",
            "http://10.1.2.3/",
            "http://169.254.169.254/latest/meta-data",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "http://localhost:8080/",
            "http://LOCALHOST./",
            "http://a.localhost/",
        ] {
            assert!(parse(private, false).is_err(), "{private}");
            assert!(parse(private, true).is_ok(), "{private}");
        }
        let long = format!("http://example.com/{}", "x".repeat(LENGTH_MAX));
        for bad in [
            "",
            "example.com",
            "ftp://example.com/",
            "file:///etc/passwd",
            "http://",
            "http://u:p@a.b/",
            &long,
        ] {
            assert!(parse(bad, true).is_err(), "{bad}");
        }
    }
}
