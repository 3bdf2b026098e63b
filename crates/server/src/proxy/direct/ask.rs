//! A request as bytes: what `headers.rs` makes of a head for hyper's client, written down without being made first.

use std::io::Write;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST, VIA};
use http::{HeaderMap, HeaderValue, Method, Uri};

use super::headers::{
    Addition, FORWARDED_FOR, FORWARDED_HOST, FORWARDED_PROTO, PSEUDONYM, place, write_user,
};
use crate::http::short::write::write_line;

/// Room for what is added to a head.
const ADDED: usize = 512;

/// What becomes of a line of a caller's head.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    /// Dropped, or written in another way.
    Dropped,
    /// Kept if callers' tokens are.
    Authorization,
    /// Kept if the caller is believed about those it speaks for.
    Forwarded,
}

fn fate(name: &str) -> Fate {
    match name {
        "connection"
        | "keep-alive"
        | "proxy-connection"
        | "proxy-authenticate"
        | "proxy-authorization"
        | "te"
        | "transfer-encoding"
        | "upgrade"
        | "x-admin-key"
        | "expect"
        | "content-length"
        | "host"
        | "x-weir-user"
        | "x-forwarded-for"
        | "via" => Fate::Dropped,
        "authorization" => Fate::Authorization,
        "forwarded" | "x-forwarded-host" | "x-forwarded-proto" => Fate::Forwarded,
        _ => Fate::Kept,
    }
}

/// The request that is made of a call whose head asks nothing of its connection.
pub(in crate::proxy) fn write(
    method: &Method,
    target: &Uri,
    headers: &HeaderMap,
    body: &Bytes,
    addition: &Addition<'_>,
) -> Vec<u8> {
    let path = target.path_and_query().map_or("/", |path| path.as_str());
    let length: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let mut out = Vec::with_capacity(path.len() + length + ADDED + body.len());
    out.extend_from_slice(method.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(path.as_bytes());
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_line(&mut out, "host", addition.host.as_bytes());
    for (name, value) in headers {
        let is_kept = match fate(name.as_str()) {
            Fate::Kept => true,
            Fate::Dropped => false,
            Fate::Authorization => addition.authorization.is_none() && addition.forward_authorization,
            Fate::Forwarded => addition.trust_forwarded,
        };
        if is_kept {
            write_line(&mut out, name.as_str(), value.as_bytes());
        }
    }
    add(&mut out, target, headers, addition);
    if !body.is_empty() || headers.contains_key(CONTENT_LENGTH) {
        // Writing to memory cannot fail.
        let _ = write!(out, "content-length: {}\r\n", body.len());
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

/// Writes what the upstream is told besides what the caller says.
fn add(out: &mut Vec<u8>, target: &Uri, headers: &HeaderMap, addition: &Addition<'_>) {
    out.extend_from_slice(b"x-weir-user: ");
    write_user(out, addition.user);
    out.extend_from_slice(b"\r\n");
    if let Some(authorization) = addition.authorization {
        write_line(out, "authorization", authorization.as_bytes());
    }
    let is_told = |name| addition.trust_forwarded && headers.contains_key(name);
    if let Some(caller) = addition.caller {
        out.extend_from_slice(b"x-forwarded-for: ");
        if addition.trust_forwarded {
            list(out, headers.get_all(FORWARDED_FOR));
        }
        let _ = write!(out, "{}\r\n", caller.address().ip().to_canonical());
    } else if is_told(FORWARDED_FOR) {
        for value in headers.get_all(FORWARDED_FOR) {
            write_line(out, "x-forwarded-for", value.as_bytes());
        }
    }
    let named = target.authority().map(|authority| place(authority).as_bytes());
    let host = named.or_else(|| headers.get(HOST).map(HeaderValue::as_bytes));
    if let Some(host) = host
        && !is_told(FORWARDED_HOST)
    {
        write_line(out, "x-forwarded-host", host);
    }
    if !is_told(FORWARDED_PROTO) {
        write_line(out, "x-forwarded-proto", b"http");
    }
    out.extend_from_slice(b"via: ");
    list(out, headers.get_all(VIA));
    out.extend_from_slice(PSEUDONYM.as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// The members of a list to which another one is to be added.
fn list<'a>(out: &mut Vec<u8>, values: impl IntoIterator<Item = &'a HeaderValue>) {
    for value in values {
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b", ");
    }
}

#[cfg(test)]
mod tests;
