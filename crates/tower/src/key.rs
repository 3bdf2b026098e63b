//! Who a request is counted for.

use std::borrow::Cow;

use http::{HeaderName, Request};

/// Says who a request is counted for. Closures do: `|request: &Request<_>| request.extensions().get::<User>()…`.
///
/// Requests of which it cannot be said are counted together, for one: nobody gets past a limit by being unknown.
pub trait Key<B>: Send + Sync + 'static {
    /// Who the request is counted for.
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

/// All requests are counted together.
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

/// Requests are counted for the value of a header, such as one that a proxy sets or that holds a key of yours. Whoever may
/// choose its value freely is not limited by it.
///
/// # Panics
/// When it is no name of a header in lower case.
#[must_use]
pub fn by_header(name: &'static str) -> ByHeader {
    ByHeader(HeaderName::from_static(name))
}

impl<B> Key<B> for ByHeader {
    fn key<'a>(&self, request: &'a Request<B>) -> Option<Cow<'a, str>> {
        request.headers().get(&self.0).map(|value| String::from_utf8_lossy(value.as_bytes()))
    }
}
