//! Which headers of a caller an upstream must not see, because it could take them for Weir's word or for another path.
//!
//! Frameworks behind CGI, WSGI and the like turn every mark in a name into an underscore, so `X_Weir_User` is `X-Weir-User` to
//! them. A name that equals a reserved one but for such marks is therefore never passed on.

use std::borrow::Cow;

use http::header::{CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// What belongs to one connection and is never passed on. `Trailer` is: trailers are.
pub(super) static HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What Weir says itself, or settles with the caller.
const OURS: [&str; 7] =
    ["authorization", "content-length", "expect", "host", "via", "x-admin-key", "x-request-id"];
/// Whatever else Weir may say one day.
const OURS_PREFIX: &str = "x-weir-";

/// In the environment of a CGI program this is `HTTP_PROXY`, which many take for the proxy of their own calls.
const PROXY: &str = "proxy";

/// By these some servers are told to read another path than that of the request: one that nobody limited.
const OTHER_PATHS: [&str; 6] = [
    "x-original-path",
    "x-original-uri",
    "x-original-url",
    "x-override-url",
    "x-rewrite-uri",
    "x-rewrite-url",
];

/// By these a proxy tells where a call came from and who made it.
const ORIGINS: [&str; 14] = [
    "cf-connecting-ip",
    "client-ip",
    "fastly-client-ip",
    "forwarded",
    "remote-user",
    "true-client-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-original-host",
    "x-originating-ip",
    "x-real-ip",
    "x-remote-addr",
    "x-remote-ip",
    "x-remote-user",
];
/// All of `X-Forwarded-For`, `-Host`, `-Proto`, `-Port`, `-Prefix`, `-User` and what else is in use.
const ORIGINS_PREFIX: &str = "x-forwarded";

/// Leaves out what a caller may not tell an upstream. `trust_forwarded`: it may tell whom it speaks for.
pub(super) fn remove_reserved(headers: &mut HeaderMap, trust_forwarded: bool) {
    let is_removed = |name: &str| match canonical(name) {
        // Under its proper name, what Weir says itself is replaced where that is done.
        Cow::Borrowed(name) => is_never_passed(name) || (is_origin(name) && !trust_forwarded),
        Cow::Owned(name) => is_reserved(&name),
    };
    remove(headers, is_removed);
}

/// Leaves nothing among trailers that is not believed in a head either.
pub(super) fn remove_reserved_trailers(trailers: &mut HeaderMap) {
    remove(trailers, |name| is_reserved(&canonical(name)));
}

fn remove(headers: &mut HeaderMap, is_removed: impl Fn(&str) -> bool) {
    let removed: Vec<_> = headers.keys().filter(|name| is_removed(name.as_str())).cloned().collect();
    for name in removed {
        headers.remove(name);
    }
}

/// A name with a hyphen for every mark: owned if it had another one.
fn canonical(name: &str) -> Cow<'_, str> {
    if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return Cow::Borrowed(name);
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    Cow::Owned(name.chars().map(plain).collect())
}

fn is_reserved(name: &str) -> bool {
    HOP_BY_HOP.iter().any(|hop| hop == name)
        || OURS.contains(&name)
        || is_never_passed(name)
        || is_origin(name)
}

fn is_never_passed(name: &str) -> bool {
    name == PROXY || name.starts_with(OURS_PREFIX) || OTHER_PATHS.contains(&name)
}

fn is_origin(name: &str) -> bool {
    name.starts_with(ORIGINS_PREFIX) || ORIGINS.contains(&name)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn left(names: &[&str], trust_forwarded: bool) -> Vec<String> {
        let value = || HeaderValue::from_static("x");
        let mut headers: HeaderMap =
            names.iter().map(|name| (name.parse::<HeaderName>().unwrap(), value())).collect();
        remove_reserved(&mut headers, trust_forwarded);
        headers.keys().map(|name| name.as_str().to_owned()).collect()
    }

    #[test]
    fn no_spelling_of_a_reserved_name_is_passed_on() {
        let names = [
            "X_Weir_User",
            "X-Weir_User",
            "x.weir.user",
            "X_Admin_Key",
            "X_Forwarded_For",
            "X_Real_IP",
            "X_Request_Id",
            "Content_Length",
            "Transfer_Encoding",
            "Proxy_Authorization",
            "X_Original_URL",
        ];
        for trust_forwarded in [false, true] {
            assert_eq!(left(&names, trust_forwarded), [""; 0]);
        }
        assert_eq!(left(&["X_Trace", "x.y", "Content_Type"], false).len(), 3, "others are the caller's own");
    }

    #[test]
    fn nothing_names_another_path_or_speaks_for_weir() {
        let names = ["X-Original-URL", "X-Rewrite-URL", "X-Original-URI", "X-Weir-Anything", "Proxy"];
        assert_eq!(left(&names, true), [""; 0]);
    }

    #[test]
    fn a_caller_says_where_a_call_came_from_only_if_it_is_trusted() {
        let names = [
            "forwarded",
            "x-forwarded-for",
            "x-forwarded-port",
            "x-forwarded-user",
            "x-real-ip",
            "client-ip",
        ];
        assert_eq!(left(&names, false), [""; 0]);
        assert_eq!(left(&names, true).len(), names.len());
    }

    #[test]
    fn trailers_say_nothing_that_only_heads_may() {
        let mut trailers = HeaderMap::new();
        let names = HOP_BY_HOP.iter().map(HeaderName::as_str).chain(OURS).chain(OTHER_PATHS).chain(ORIGINS);
        for name in names.chain(["x-weir-user", "x_weir_user", "x-forwarded-for"]) {
            trailers.insert(name.parse::<HeaderName>().unwrap(), HeaderValue::from_static("x"));
        }
        trailers.insert("x-sum", HeaderValue::from_static("1"));
        remove_reserved_trailers(&mut trailers);
        assert_eq!(trailers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-sum"]);
    }
}
