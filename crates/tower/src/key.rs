//! Extracts the key that a request is counted under.

use std::borrow::Cow;

use http::{HeaderName, Request};

/// Extracts the caller of a request. Implemented for closures: `|request: &Request<_>| request.extensions().get::<User>()…`.
///
/// Requests without a caller are counted together under one key, so that they cannot evade the limit.
pub trait Key<B>: Send + Sync + 'static {
    /// Returns the caller, or `None` if the request has none.
    fn key<'a>(&self, request: &'a Request<B>) -> Option<Cow<'a, str>>;
}

impl<B, F> Key<B> for F
where
    F: Fn(&Request<B>) -> Option<String> + Send + Sync + 'static,
{
    fn key<'a>(&self, request: &'a Request<B>) -> Option<Cow<'a, str>> {
        self(request).map(Cow::Owned)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Everybody;

impl<B> Key<B> for Everybody {
    fn key<'a>(&self, _: &'a Request<B>) -> Option<Cow<'a, str>> {
        None
    }
}

/// See [`by_header`].
#[derive(Clone, Debug)]
pub struct ByHeader(HeaderName);

/// Counts requests by the value of a header, such as one that a proxy sets or that contains an API key. Callers who can
/// choose the value freely can evade the limit.
///
/// # Panics
/// If `name` is not a header name in lower case.
#[must_use]
pub fn by_header(name: &'static str) -> ByHeader {
    ByHeader(HeaderName::from_static(name))
}

impl<B> Key<B> for ByHeader {
    fn key<'a>(&self, request: &'a Request<B>) -> Option<Cow<'a, str>> {
        request.headers().get(&self.0).map(|value| String::from_utf8_lossy(value.as_bytes()))
    }
}
