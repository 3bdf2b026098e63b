//! The files of the pages that `web/` builds, embedded in the binary if they existed when it was built: the console and the sale
//! page. They run under one strict policy, which `sale/page.rs` opens for the provider of a challenge.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderName;
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};

/// Paths below `web/dist`, and contents, in order of path.
pub(crate) const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// Everything is loaded from this server, and no string is executed as code.
pub(crate) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// Nobody learns from where a page was opened.
pub(crate) const NO_REFERRER: &str = "no-referrer";

const REVALIDATE: &str = "no-cache";
/// For files whose names change with their contents.
const FOR_EVER: &str = "public, max-age=31536000, immutable";

/// The response with a file; `None` if there is none of exactly that name.
pub(crate) fn find(name: &str) -> Option<Response> {
    let index = FILES.binary_search_by_key(&name, |(name, _)| name).ok()?;
    let (name, content) = FILES.get(index)?;
    let caching = if name.starts_with("assets/") { FOR_EVER } else { REVALIDATE };
    Some(respond(name, caching, Bytes::from_static(content), POLICY, NO_REFERRER))
}

/// The response with a page that is no file of `web/dist`.
pub(crate) fn html(content: &'static str) -> Response {
    html_under(Bytes::from_static(content.as_bytes()), POLICY, NO_REFERRER)
}

/// The response with a page that runs under a policy of its own.
pub(crate) fn html_under(content: Bytes, policy: &str, referrer: &str) -> Response {
    respond("index.html", REVALIDATE, content, policy, referrer)
}

fn respond(name: &str, caching: &str, content: Bytes, policy: &str, referrer: &str) -> Response {
    let headers: [(HeaderName, &str); 4] = [
        (CONTENT_TYPE, content_type(name)),
        (CACHE_CONTROL, caching),
        (CONTENT_SECURITY_POLICY, policy),
        (REFERRER_POLICY, referrer),
    ];
    (headers, content).into_response()
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_only_by_their_exact_names() {
        assert!(FILES.is_sorted_by_key(|(name, _)| name));
        for (name, content) in FILES {
            let found = find(name).unwrap();
            assert_eq!(found.headers()[CONTENT_SECURITY_POLICY], POLICY);
            assert!(!content.is_empty() && content_type(name) != "application/octet-stream", "{name}");
        }
        for other in ["", "../Cargo.toml", "assets/", "assets/../index.html", "/index.html", "INDEX.HTML"] {
            assert!(find(other).is_none(), "{other}");
        }
    }
}
