//! What is passed on of a head, and what is added to it.

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

/// How Weir names itself among those that passed a message on.
const PSEUDONYM: &str = "1.1 weir";

/// Takes out what belongs to the connection it came by, including whatever `Connection` names.
pub(super) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Whether an answer says in two ways how long it is, or has no body and says that it has one. Whoever made it may think
/// of its end in the other way. `is_long` is whether the length that it tells, if it does, is more than none. Answers to HEAD
/// and 304 rightly say how long another answer would be; an upstream that sends that body all the same is found out too late.
pub(super) fn is_ambiguous(
    is_head: bool,
    status: StatusCode,
    is_encoded: bool,
    is_long: Option<bool>,
) -> bool {
    let is_bodiless = is_head || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
    is_encoded && is_long.is_some() || is_bodiless && (is_encoded || is_long == Some(true))
}

/// Has a length that is told more than once told once; not at all, if it is not the same each time. Nobody after us shall
/// have to choose.
pub(super) fn settle_length(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lines.next() else { return };
    let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if lines.next().is_none() && is_number(first.as_bytes()) {
        return;
    }
    let told: Vec<&str> = tokens(headers, &CONTENT_LENGTH).collect();
    let one = told.first().filter(|one| is_number(one.as_bytes()) && told.iter().all(|other| other == *one));
    match one.and_then(|one| HeaderValue::from_str(one).ok()) {
        Some(length) => headers.insert(CONTENT_LENGTH, length),
        None => headers.remove(CONTENT_LENGTH),
    };
}

/// Where an authority is, without who asks there.
fn place(authority: &Authority) -> &str {
    let authority = authority.as_str();
    authority.rsplit_once('@').map_or(authority, |(_credentials, place)| place)
}

/// The members of a list, over all lines of a header.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// Whether a request wants to become a WebSocket. No other protocol is let through: a connection that both sides take
/// for HTTP/2 could carry calls to any path, which nobody limits.
pub(super) fn wants_websocket(headers: &HeaderMap) -> bool {
    tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
        && tokens(headers, &UPGRADE).eq_by_case("websocket")
}

/// Whether a list has this one member.
trait OneMember {
    fn eq_by_case(self, wanted: &str) -> bool;
}

impl<'a, I: Iterator<Item = &'a str>> OneMember for I {
    fn eq_by_case(mut self, wanted: &str) -> bool {
        self.next().is_some_and(|token| token.eq_ignore_ascii_case(wanted)) && self.next().is_none()
    }
}

/// Whether whoever sent this understands trailers.
pub(super) fn takes_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"))
}

/// What an upstream is told besides what the caller says.
pub(super) struct Addition<'a> {
    /// Who calls.
    pub(super) peer: Option<&'a Peer>,
    /// The user whose token it was.
    pub(super) user: &'a str,
    /// The upstream's own name.
    pub(super) host: &'a HeaderValue,
    /// What the upstream is shown as credentials.
    pub(super) authorization: Option<&'a HeaderValue>,
    /// Whether the caller's own are left in their place.
    pub(super) forward_authorization: bool,
    /// Whether the caller is believed about those it speaks for.
    pub(super) trust_forwarded: bool,
}

impl Addition<'_> {
    /// Makes a caller's headers, already stripped, into those of the call to the upstream.
    pub(super) fn apply(&self, headers: &mut HeaderMap, target: &Uri) {
        remove_reserved(headers, self.trust_forwarded);
        for name in [ADMIN_KEY, EXPECT, CONTENT_LENGTH] {
            headers.remove(name);
        }
        let host = target.authority().and_then(|authority| place(authority).parse().ok());
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
        headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
        append(headers, &VIA, PSEUDONYM);
    }
}

/// Adds a member to the end of a list, in one line.
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

/// A user's name as a header: what is not plain ASCII is written `%XX`, as is the percent sign.
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

    fn addition(host: &HeaderValue) -> Addition<'_> {
        Addition {
            peer: None,
            user: "a@b.c",
            host,
            authorization: None,
            forward_authorization: false,
            trust_forwarded: false,
        }
    }

    #[test]
    fn what_belongs_to_a_connection_stays_there() {
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
        strip(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["trailer", "x-ours"]);
    }

    #[test]
    fn an_answer_whose_end_is_told_in_two_ways_is_ambiguous() {
        let answer = |is_head, status: u16, is_encoded, is_long| {
            is_ambiguous(is_head, StatusCode::from_u16(status).unwrap(), is_encoded, is_long)
        };
        let ambiguous = |status, is_encoded, is_long| answer(false, status, is_encoded, is_long);
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
    fn an_authority_is_told_without_credentials() {
        for (authority, expected) in [("u:p@a.b:80", "a.b:80"), ("a.b", "a.b"), ("u@[::1]:8", "[::1]:8")] {
            assert_eq!(place(&authority.parse().unwrap()), expected);
        }
    }

    #[test]
    fn a_length_is_told_once() {
        for (told, expected) in [
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
            for length in told {
                headers.append(CONTENT_LENGTH, HeaderValue::from_static(length));
            }
            settle_length(&mut headers);
            let left: Vec<_> = headers.get_all(CONTENT_LENGTH).iter().collect();
            assert_eq!(left, expected.into_iter().collect::<Vec<_>>(), "{told:?}");
        }
    }

    #[test]
    fn only_a_websocket_is_an_upgrade() {
        let wants =
            |connection, upgrade| wants_websocket(&map(&[("connection", connection), ("upgrade", upgrade)]));
        assert!(wants("keep-alive, Upgrade", "WebSocket"));
        assert!(!wants("Upgrade, HTTP2-Settings", "h2c"));
        assert!(!wants("Upgrade", "websocket, h2c"));
        assert!(!wants("keep-alive", "websocket"));
        assert!(!wants_websocket(&HeaderMap::new()));
    }

    #[test]
    fn an_upstream_is_told_who_calls_and_not_with_what() {
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
        addition(&host).apply(&mut headers, &Uri::from_static("/x"));
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
    fn a_trusted_caller_speaks_for_others() {
        let mut headers = map(&[("x-forwarded-host", "shop.example"), ("x-forwarded-proto", "https")]);
        let host = HeaderValue::from_static("upstream");
        let upstream_key = HeaderValue::from_static("Bearer sk-1");
        let trusting = Addition {
            trust_forwarded: true,
            authorization: Some(&upstream_key),
            forward_authorization: true,
            ..addition(&host)
        };
        trusting.apply(&mut headers, &Uri::from_static("http://other.example/x"));
        assert_eq!(headers["x-forwarded-host"], "shop.example");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["authorization"], "Bearer sk-1", "the upstream's own comes first");
    }

    #[test]
    fn any_name_of_a_user_is_a_header() {
        assert_eq!(user("a@b.c"), "a@b.c");
        assert_eq!(user("ü \r\n50%"), "%C3%BC%20%0D%0A50%25");
    }
}
