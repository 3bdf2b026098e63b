//! Which headers are forwarded, and which are added.

use std::io::Write;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, UPGRADE, VIA};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};

use super::reserved_headers::{HOP_BY_HOP, remove_reserved};
use crate::peer::Peer;

const ADMIN_KEY: HeaderName = HeaderName::from_static("x-admin-key");
const USER: HeaderName = HeaderName::from_static("x-weir-user");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Weir's entry in the `Via` header.
const PSEUDONYM: &str = "1.1 weir";

/// Removes hop-by-hop headers and those that `Connection` names.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Whether the end of a response can be read in two ways: it has both a transfer encoding and a length, or has no body but
/// headers that announce one. `has_content` is whether `Content-Length`, if present, is above 0. Responses to HEAD and 304
/// may announce the body of another response, but an upstream that does send that body would be noticed too late.
pub(super) fn is_length_ambiguous(
    is_head: bool,
    status: StatusCode,
    is_encoded: bool,
    has_content: Option<bool>,
) -> bool {
    let is_bodiless = is_head || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
    is_encoded && has_content.is_some() || is_bodiless && (is_encoded || has_content == Some(true))
}

/// Merges repeated equal `Content-Length` values into one, and removes the header if they differ or are not numbers: the
/// next reader must not have to choose.
pub(super) fn normalize_content_length(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lines.next() else { return };
    let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if lines.next().is_none() && is_number(first.as_bytes()) {
        return;
    }
    let values: Vec<&str> = tokens(headers, &CONTENT_LENGTH).collect();
    let length = values
        .first()
        .filter(|length| is_number(length.as_bytes()) && values.iter().all(|other| other == *length));
    match length.and_then(|length| HeaderValue::from_str(length).ok()) {
        Some(length) => headers.insert(CONTENT_LENGTH, length),
        None => headers.remove(CONTENT_LENGTH),
    };
}

/// An authority without credentials.
fn host_and_port(authority: &Authority) -> &str {
    let authority = authority.as_str();
    authority.rsplit_once('@').map_or(authority, |(_credentials, host)| host)
}

/// The members of a list header, over all its lines.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Whether a request asks for a WebSocket and nothing else. Other protocols are not forwarded: over an HTTP/2 connection the
/// caller could call any path, without limits.
pub(super) fn is_websocket_upgrade(headers: &HeaderMap) -> bool {
    let mut protocols = tokens(headers, &UPGRADE);
    tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        && protocols.next().is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket"))
        && protocols.next().is_none()
}

/// Whether the sender understands trailers.
pub(super) fn accepts_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"))
}

/// What the headers of a call to the upstream are made from, besides those of the caller.
pub(super) struct UpstreamHeaders<'a> {
    pub(super) peer: Option<&'a Peer>,
    /// The `sub` of the caller's token.
    pub(super) user: &'a str,
    /// The upstream's `Host`.
    pub(super) host: &'a HeaderValue,
    /// Credentials for the upstream, which replace the caller's.
    pub(super) authorization: Option<&'a HeaderValue>,
    /// Whether the caller's credentials are forwarded if there are no others.
    pub(super) forward_authorization: bool,
    /// Whether the caller's forwarding headers are trusted.
    pub(super) trust_forwarded: bool,
}

impl UpstreamHeaders<'_> {
    /// Turns a caller's headers, hop-by-hop ones already removed, into those of the call to the upstream.
    pub(super) fn apply(&self, headers: &mut HeaderMap, target: &Uri) {
        remove_reserved(headers, self.trust_forwarded);
        for name in [ADMIN_KEY, EXPECT, CONTENT_LENGTH] {
            headers.remove(name);
        }
        let host = target.authority().and_then(|authority| host_and_port(authority).parse().ok());
        let host = host.or_else(|| headers.remove(HOST));
        headers.insert(HOST, self.host.clone());
        headers.insert(USER, user(self.user));
        if let Some(authorization) = self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        } else if !self.forward_authorization {
            headers.remove(AUTHORIZATION);
        }
        if let Some(peer) = self.peer {
            append(headers, &FORWARDED_FOR, &peer.address().ip().to_canonical().to_string());
        }
        if let Some(host) = host {
            headers.entry(FORWARDED_HOST).or_insert(host);
        }
        let scheme = if self.peer.is_some_and(Peer::is_encrypted) { "https" } else { "http" };
        headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static(scheme));
        append(headers, &VIA, PSEUDONYM);
    }
}

/// Appends a member to a list header and joins its lines into one.
fn append(headers: &mut HeaderMap, name: &HeaderName, member: &str) {
    let mut lines = headers.get_all(name).iter();
    let value = match (lines.next(), lines.next()) {
        (None, _) => HeaderValue::from_str(member).ok(),
        (Some(first), None) => {
            HeaderValue::from_bytes(&[first.as_bytes(), b", ", member.as_bytes()].concat()).ok()
        }
        (Some(_), Some(_)) => {
            let all: Vec<&[u8]> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
            HeaderValue::from_bytes(&[&all.join(&b", "[..]), b", ".as_slice(), member.as_bytes()].concat())
                .ok()
        }
    };
    if let Some(value) = value {
        headers.insert(name, value);
    }
}

/// A user's name as a header value: percent signs and everything but printable ASCII are percent-encoded.
fn user(name: &str) -> HeaderValue {
    let mut text = Vec::with_capacity(name.len());
    for byte in name.bytes() {
        if is_plain(byte) {
            text.push(byte);
        } else {
            // Writing to memory cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    HeaderValue::from_maybe_shared(Bytes::from(text)).unwrap_or(HeaderValue::from_static(""))
}

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && byte != b'%'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    fn upstream_headers(host: &HeaderValue) -> UpstreamHeaders<'_> {
        UpstreamHeaders {
            peer: None,
            user: "a@b.c",
            host,
            authorization: None,
            forward_authorization: false,
            trust_forwarded: false,
        }
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "close, X-Mine"),
            ("connection", "x-yours, not a name, "),
            ("keep-alive", "timeout=5"),
            ("x-mine", "1"),
            ("x-yours", "2"),
            ("x-ours", "3"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("trailer", "x-sum"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "Basic x"),
        ]);
        remove_hop_by_hop(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["trailer", "x-ours"]);
    }

    #[test]
    fn a_response_whose_end_can_be_read_in_two_ways_is_ambiguous() {
        let answer = |is_head, status: u16, is_encoded, has_content| {
            is_length_ambiguous(is_head, StatusCode::from_u16(status).unwrap(), is_encoded, has_content)
        };
        let ambiguous = |status, is_encoded, has_content| answer(false, status, is_encoded, has_content);
        let (long, none) = (Some(true), Some(false));
        assert!(ambiguous(200, true, long) && ambiguous(204, false, long) && ambiguous(204, true, None));
        assert!(!ambiguous(200, false, long) && !ambiguous(200, true, None) && !ambiguous(204, false, none));
        assert!(ambiguous(304, false, long) && ambiguous(304, true, None) && !ambiguous(304, false, none));
        assert!(answer(true, 200, false, long) && answer(true, 200, true, None));
        assert!(
            !answer(true, 200, false, none)
                && !answer(true, 200, false, None)
                && !ambiguous(204, false, None)
        );
    }

    #[test]
    fn credentials_are_left_out_of_an_authority() {
        for (authority, expected) in [("u:p@a.b:80", "a.b:80"), ("a.b", "a.b"), ("u@[::1]:8", "[::1]:8")] {
            assert_eq!(host_and_port(&authority.parse().unwrap()), expected);
        }
    }

    #[test]
    fn content_length_is_normalized_or_removed() {
        for (values, expected) in [
            (&["5"][..], Some("5")),
            (&["5", "5"], Some("5")),
            (&["5, 5"], Some("5")),
            (&["5", "6"], None),
            (&["5, x"], None),
            (&["x"], None),
            (&[""], None),
            (&[], None),
        ] {
            let mut headers = HeaderMap::new();
            for length in values {
                headers.append(CONTENT_LENGTH, HeaderValue::from_static(length));
            }
            normalize_content_length(&mut headers);
            let left: Vec<_> = headers.get_all(CONTENT_LENGTH).iter().collect();
            assert_eq!(left, expected.into_iter().collect::<Vec<_>>(), "{values:?}");
        }
    }

    #[test]
    fn only_a_websocket_is_an_upgrade() {
        let wants = |connection, upgrade| {
            is_websocket_upgrade(&map(&[("connection", connection), ("upgrade", upgrade)]))
        };
        assert!(wants("keep-alive, Upgrade", "WebSocket"));
        assert!(!wants("Upgrade, HTTP2-Settings", "h2c"));
        assert!(!wants("Upgrade", "websocket, h2c"));
        assert!(!wants("keep-alive", "websocket"));
        assert!(!is_websocket_upgrade(&HeaderMap::new()));
    }

    #[test]
    fn an_upstream_sees_the_user_but_no_credentials_or_forged_headers() {
        let mut headers = map(&[
            ("host", "weir.example"),
            ("authorization", "Bearer weir-token"),
            ("x-admin-key", "key"),
            ("x-weir-user", "somebody else"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-host", "evil.example"),
            ("forwarded", "for=1.2.3.4"),
            ("x_weir_user", "somebody else"),
            ("x-real-ip", "1.2.3.4"),
            ("x-original-url", "/admin"),
            ("via", "1.0 before"),
            ("via", "1.1 between"),
            ("cookie", "kept"),
        ]);
        let host = HeaderValue::from_static("upstream:9000");
        upstream_headers(&host).apply(&mut headers, &Uri::from_static("/x"));
        let expected = map(&[
            ("host", "upstream:9000"),
            ("x-weir-user", "a@b.c"),
            ("x-forwarded-host", "weir.example"),
            ("x-forwarded-proto", "http"),
            ("via", "1.0 before, 1.1 between, 1.1 weir"),
            ("cookie", "kept"),
        ]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn forwarding_headers_of_a_trusted_caller_are_kept() {
        let mut headers = map(&[("x-forwarded-host", "shop.example"), ("x-forwarded-proto", "https")]);
        let host = HeaderValue::from_static("upstream");
        let upstream_key = HeaderValue::from_static("Bearer sk-1");
        let trusting = UpstreamHeaders {
            trust_forwarded: true,
            authorization: Some(&upstream_key),
            forward_authorization: true,
            ..upstream_headers(&host)
        };
        trusting.apply(&mut headers, &Uri::from_static("http://other.example/x"));
        assert_eq!(headers["x-forwarded-host"], "shop.example");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["authorization"], "Bearer sk-1", "the upstream's own comes first");
    }

    #[test]
    fn any_user_name_becomes_a_valid_header() {
        assert_eq!(user("a@b.c"), "a@b.c");
        assert_eq!(user("ü \r\n50%"), "%C3%BC%20%0D%0A50%25");
    }
}
