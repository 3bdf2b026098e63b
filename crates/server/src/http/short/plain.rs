//! Plain requests: GET without a body, or POST with one whose length is told, small, of HTTP/1.1, with nothing in their heads
//! that has to do with the connection. Everything else is for hyper to judge.

use std::ops::Range;

use axum::body::Body;
use axum::extract::Request;
use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

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

/// Where the parts of a request are.
struct Parts {
    method: Method,
    target: Range<usize>,
    lines: [Line; HEADERS_MAX],
    line_count: usize,
    body: Range<usize>,
}

/// Where a header is.
#[derive(Clone, Debug)]
struct Line {
    name: Range<usize>,
    value: Range<usize>,
}

/// Takes the request that the bytes begin with, if it is a plain one on a route that `find` finds. Otherwise they are left as
/// they are.
pub(super) fn take<S>(
    bytes: &mut Bytes,
    find: impl FnOnce(&Method, &str) -> Option<S>,
) -> Result<(Request, S), Not> {
    if bytes.is_empty() {
        return Err(Not::Whole);
    }
    let (parts, route) = parse(bytes, find)?;
    let request = parts.build(bytes).ok_or(Not::Plain)?;
    bytes.advance(parts.body.end);
    Ok((request, route))
}

fn parse<S>(bytes: &[u8], find: impl FnOnce(&Method, &str) -> Option<S>) -> Result<(Parts, S), Not> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let head_length = match head.parse(bytes) {
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
    let mut lines = [const { Line { name: 0..0, value: 0..0 } }; HEADERS_MAX];
    for (line, header) in lines.iter_mut().zip(head.headers.iter()) {
        *line = Line { name: place(bytes, header.name.as_bytes()), value: place(bytes, header.value) };
    }
    let (target, line_count) = (place(bytes, target.as_bytes()), head.headers.len());
    Ok((Parts { method, target, lines, line_count, body: head_length..end }, route))
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

/// Where `part` is within the bytes that it is a part of.
fn place(bytes: &[u8], part: &[u8]) -> Range<usize> {
    let start = part.as_ptr().addr() - bytes.as_ptr().addr();
    start..start + part.len()
}

impl Parts {
    fn build(&self, bytes: &Bytes) -> Option<Request> {
        let part = |range: &Range<usize>| bytes.slice(range.clone());
        let mut headers = HeaderMap::with_capacity(self.line_count + 1);
        for line in self.lines.get(..self.line_count)? {
            let name = HeaderName::from_bytes(bytes.get(line.name.clone())?).ok()?;
            headers.append(name, HeaderValue::from_maybe_shared(part(&line.value)).ok()?);
        }
        let mut request =
            Request::new(if self.body.is_empty() { Body::empty() } else { Body::from(part(&self.body)) });
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = Uri::from_maybe_shared(part(&self.target)).ok()?;
        *request.headers_mut() = headers;
        Some(request)
    }
}

#[cfg(test)]
mod tests;
