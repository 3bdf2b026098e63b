//! Headers of a caller that are not forwarded, because the upstream could take them for Weir's own or for another path.
//!
//! CGI, WSGI and the like turn all punctuation in a name into underscores, so `X_Weir_User` is `X-Weir-User` to frameworks
//! behind them. A name that differs from a reserved one only in punctuation is therefore never forwarded.

use std::borrow::Cow;

use http::header::{CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Headers of one connection, never forwarded. `Trailer` is not among them, because trailers are forwarded.
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

/// Headers that Weir sets itself or handles with the caller.
const OURS: [&str; 9] = [
    "authorization",
    "content-length",
    "expect",
    "host",
    "traceparent",
    "tracestate",
    "via",
    "x-admin-key",
    "x-request-id",
];
/// Reserved for headers that Weir may set in the future.
const OURS_PREFIX: &str = "x-weir-";

/// Becomes the variable `HTTP_PROXY` of a CGI program, which many HTTP clients use as their proxy.
const PROXY: &str = "proxy";

/// Headers that make some servers use another path than the request's: one that was not checked.
const OTHER_PATHS: [&str; 6] = [
    "x-original-path",
    "x-original-uri",
    "x-original-url",
    "x-override-url",
    "x-rewrite-uri",
    "x-rewrite-url",
];

/// Headers in which a proxy states where a call came from and who made it.
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
/// `X-Forwarded-For`, `-Host`, `-Proto`, `-Port`, `-Prefix`, `-User` and others in use.
const ORIGINS_PREFIX: &str = "x-forwarded";

/// Removes reserved headers. With `trust_forwarded`, those that state the origin of the call stay.
pub(super) fn remove_reserved(headers: &mut HeaderMap, trust_forwarded: bool) {
    let is_removed = |name: &str| match canonical(name) {
        // Weir's own headers under their proper names are replaced later.
        Cow::Borrowed(name) => is_never_forwarded(name) || (is_origin(name) && !trust_forwarded),
        Cow::Owned(name) => is_reserved(&name),
    };
    remove(headers, is_removed);
}

/// Removes every reserved name from trailers.
pub(super) fn remove_reserved_trailers(trailers: &mut HeaderMap) {
    remove(trailers, |name| is_reserved(&canonical(name)));
}

fn remove(headers: &mut HeaderMap, is_removed: impl Fn(&str) -> bool) {
    let removed: Vec<_> = headers.keys().filter(|name| is_removed(name.as_str())).cloned().collect();
    for name in removed {
        headers.remove(name);
    }
}

/// The name with a hyphen for all other punctuation: owned if that changed it.
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
        || is_never_forwarded(name)
        || is_origin(name)
}

fn is_never_forwarded(name: &str) -> bool {
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
    fn no_spelling_of_a_reserved_name_is_forwarded() {
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
    fn headers_that_name_another_path_or_are_weirs_own_are_removed() {
        let names = ["X-Original-URL", "X-Rewrite-URL", "X-Original-URI", "X-Weir-Anything", "Proxy"];
        assert_eq!(left(&names, true), [""; 0]);
    }

    #[test]
    fn headers_that_state_the_origin_are_forwarded_only_for_trusted_callers() {
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
    fn reserved_names_are_removed_from_trailers() {
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
