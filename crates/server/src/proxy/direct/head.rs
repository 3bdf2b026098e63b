//! The heads of answers: what is passed on of them, how their bodies end, and whether the connection is of more use.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use httparse::{Header, ParserConfig, Response, Status};
use hyper::ext::ReasonPhrase;

use super::super::headers::{is_doubtful, is_hop_by_hop, settle_length};
use super::body::Body;

/// How many headers an answer may have.
const HEADERS_MAX: usize = 100;
/// Bodies cannot be longer: what is beyond has other meanings to those who count with it.
const LENGTH_MAX: u64 = u64::MAX - 2;

/// The head of an answer, without what belongs to its connection.
#[derive(Debug)]
pub(in crate::proxy) struct Head {
    pub(in crate::proxy) status: StatusCode,
    /// The upstream's own words for it.
    pub(in crate::proxy) reason: Option<ReasonPhrase>,
    pub(in crate::proxy) headers: HeaderMap,
    pub(in crate::proxy) body: Body,
    /// Whether another call can be made once the body has come.
    pub(in crate::proxy) is_kept: bool,
}

/// Why it is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum Malformed {
    #[error("its head is not one: {0}")]
    Syntax(httparse::Error),
    #[error("its head has a line that is no header")]
    Header,
    #[error("its length is not one")]
    Length,
    #[error("it has an encoding that its version does not know")]
    Encoding,
}

/// Takes the head of an answer out of what was read, and the heads of those that only announce it. None when more has to come
/// first. `is_bodiless` is whether the answer to such a request has no body in any case.
pub(in crate::proxy) fn take(read: &mut Bytes, is_bodiless: bool) -> Result<Option<Head>, Malformed> {
    loop {
        if read.is_empty() {
            return Ok(None);
        }
        let mut lines = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let mut parsed = Response::new(&mut []);
        let config = ParserConfig::default();
        let length = match config.parse_response_with_uninit_headers(&mut parsed, read, &mut lines) {
            Ok(Status::Complete(length)) => length,
            Ok(Status::Partial) => return Ok(None),
            Err(error) => return Err(Malformed::Syntax(error)),
        };
        let code = parsed.code.unwrap_or_default();
        let head = match code {
            100 | 102..=199 => None,
            _ => Some(build(&parsed, read, is_bodiless)?),
        };
        read.advance(length);
        if head.is_some() {
            return Ok(head);
        }
    }
}

/// What the lines of a head say about its connection and its body.
#[derive(Default)]
struct Notes<'a> {
    asks_to_close: bool,
    asks_to_keep: bool,
    /// What else `Connection` names.
    named: Vec<&'a str>,
    /// Whether the last encoding named so far is `chunked`; none where none is named.
    is_chunked: Option<bool>,
    length: Option<Result<u64, Malformed>>,
}

fn build(parsed: &Response<'_, '_>, bytes: &Bytes, is_bodiless: bool) -> Result<Head, Malformed> {
    let code = parsed.code.unwrap_or_default();
    let status = StatusCode::from_u16(code).map_err(|_invalid| Malformed::Syntax(httparse::Error::Status))?;
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + ADDED);
    let mut notes = Notes::default();
    for line in parsed.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_invalid| Malformed::Header)?;
        notes.take(&name, line);
        if !is_hop_by_hop(&name) {
            let value = HeaderValue::from_maybe_shared(bytes.slice_ref(line.value));
            headers.append(name, value.map_err(|_invalid| Malformed::Header)?);
        }
    }
    for name in &notes.named {
        headers.remove(*name);
    }
    let is_new = parsed.version == Some(1);
    if notes.is_chunked.is_some() {
        headers.remove(CONTENT_LENGTH);
    }
    settle_length(&mut headers);
    let body = notes.body(is_bodiless || matches!(code, 101 | 204 | 304), is_new)?;
    Ok(Head {
        status,
        reason: reason(parsed.reason.unwrap_or_default(), status, bytes),
        headers,
        body,
        is_kept: notes.is_kept(status, is_new),
    })
}

/// Room for what is added to an answer: what a caller is told of its limits, and the id of its request.
const ADDED: usize = 8;

fn reason(words: &str, status: StatusCode, bytes: &Bytes) -> Option<ReasonPhrase> {
    if Some(words) == status.canonical_reason() {
        return None;
    }
    let words = if words.is_empty() { Bytes::new() } else { bytes.slice_ref(words.as_bytes()) };
    ReasonPhrase::try_from(words).ok()
}

impl<'a> Notes<'a> {
    fn take(&mut self, name: &HeaderName, line: &Header<'a>) {
        let value = std::str::from_utf8(line.value).ok().filter(|value| value.is_ascii());
        if name == CONNECTION {
            for token in value.unwrap_or_default().split(',').map(str::trim) {
                if token.eq_ignore_ascii_case("close") {
                    self.asks_to_close = true;
                } else if token.eq_ignore_ascii_case("keep-alive") {
                    self.asks_to_keep = true;
                } else if !token.is_empty() {
                    self.named.push(token);
                }
            }
        } else if name == TRANSFER_ENCODING {
            let last = value.and_then(|value| value.rsplit(',').next()).unwrap_or_default();
            self.is_chunked = Some(last.trim().eq_ignore_ascii_case("chunked"));
        } else if name == CONTENT_LENGTH {
            let mut told = value.unwrap_or_default().split(',').map(|number| digits(number.trim()));
            let first = self.length.or_else(|| told.next());
            let is_one = told.all(|length| Some(length) == first);
            self.length = if is_one { first } else { Some(Err(Malformed::Length)) };
        }
    }

    fn body(&self, is_bodiless: bool, is_new: bool) -> Result<Body, Malformed> {
        match (self.is_chunked, self.length) {
            _ if is_bodiless => Ok(Body::Ended),
            (Some(_), _) if !is_new => Err(Malformed::Encoding),
            (Some(true), _) => Ok(Body::chunked()),
            (Some(false), _) | (None, None) => Ok(Body::UntilClosed),
            (None, Some(length)) => Ok(if length? == 0 { Body::Ended } else { Body::Length(length?) }),
        }
    }

    /// An answer whose end may be thought of in two ways is believed, and nothing after it.
    fn is_kept(&self, status: StatusCode, is_new: bool) -> bool {
        let is_long = self.length.map(|length| length != Ok(0));
        let is_doubtful = is_doubtful(status, self.is_chunked.is_some(), is_long);
        let may_be = !self.asks_to_close && (is_new || self.asks_to_keep);
        may_be && !is_doubtful && status != StatusCode::SWITCHING_PROTOCOLS
    }
}

/// A number that is nothing but digits.
fn digits(text: &str) -> Result<u64, Malformed> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let length = is_plain.then(|| text.parse().ok()).flatten();
    length.filter(|length| *length <= LENGTH_MAX).ok_or(Malformed::Length)
}

#[cfg(test)]
mod tests;
