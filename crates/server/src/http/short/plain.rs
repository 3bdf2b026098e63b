//! Plain requests: GET without a body, or POST with one whose length is told, small, of HTTP/1.1, with nothing in their heads
//! that has to do with the connection. Everything else is for hyper to judge.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

/// Requests with more are not plain.
const HEADERS_MAX: usize = 32;
/// Longer requests are not plain.
const REQUEST_MAX: usize = 64 << 10;

/// Why no request was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Not {
    /// It is the beginning of what may become a plain one.
    Whole,
    /// It is something else.
    Plain,
}

/// Takes the request that the bytes begin with, if it is a plain one on a route that `find` finds. Otherwise they are left as
/// they are.
pub(super) fn take<S>(
    bytes: &mut Bytes,
    find: impl FnOnce(&Method, &str) -> Option<S>,
) -> Result<(Request<Bytes>, S), Not> {
    if bytes.is_empty() {
        return Err(Not::Whole);
    }
    let (request, route, end) = parse(bytes, find)?;
    bytes.advance(end);
    Ok((request, route))
}

/// The request, its route, and where it ends.
fn parse<S>(
    bytes: &Bytes,
    find: impl FnOnce(&Method, &str) -> Option<S>,
) -> Result<(Request<Bytes>, S, usize), Not> {
    let mut lines = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut []);
    let head_length = match head.parse_with_uninit_headers(bytes, &mut lines) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < REQUEST_MAX => return Err(Not::Whole),
        Ok(httparse::Status::Partial) | Err(_) => return Err(Not::Plain),
    };
    let (Some(target), Some(1)) = (head.path, head.version) else { return Err(Not::Plain) };
    let method = parse_method(head.method).ok_or(Not::Plain)?;
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let route = find(&method, path).ok_or(Not::Plain)?;
    let body_length = body_length(&method, head.headers).ok_or(Not::Plain)?;
    let end = head_length.saturating_add(body_length);
    if end > REQUEST_MAX {
        return Err(Not::Plain);
    }
    if bytes.len() < end {
        return Err(Not::Whole);
    }
    let mut request = Request::new(bytes.slice(head_length..end));
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from_maybe_shared(bytes.slice_ref(target.as_bytes())).ok().ok_or(Not::Plain)?;
    *request.headers_mut() = build(bytes, head.headers).ok_or(Not::Plain)?;
    Ok((request, route, end))
}

fn build(bytes: &Bytes, lines: &[httparse::Header<'_>]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::with_capacity(lines.len() + 1);
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes()).ok()?;
        headers.append(name, HeaderValue::from_maybe_shared(bytes.slice_ref(line.value)).ok()?);
    }
    Some(headers)
}

fn parse_method(method: Option<&str>) -> Option<Method> {
    match method {
        Some("GET") => Some(Method::GET),
        Some("POST") => Some(Method::POST),
        _ => None,
    }
}

/// How long the body is; none, when the head says anything that could make that, or the connection, something special.
fn body_length(method: &Method, headers: &[httparse::Header<'_>]) -> Option<usize> {
    let mut told = None;
    for header in headers {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        match header.name.len() {
            14 if is("content-length") => {
                let value = std::str::from_utf8(header.value).ok()?;
                let is_plain =
                    (1..=6).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_digit());
                if told.is_some() || !is_plain {
                    return None;
                }
                told = value.parse().ok();
            }
            10 if is("connection") && !header.value.eq_ignore_ascii_case(b"keep-alive") => return None,
            2 if is("te") => return None,
            6 if is("expect") => return None,
            7 if is("upgrade") || is("trailer") => return None,
            17 if is("transfer-encoding") => return None,
            16 if is("proxy-connection") => return None,
            _ => {}
        }
    }
    match (method, told) {
        (&Method::GET, None) => Some(0),
        (&Method::POST, Some(length)) => Some(length),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
