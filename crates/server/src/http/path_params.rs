//! The parameters in a request's path, as the router found them.

use axum::extract::FromRequestParts;
use http::request::Parts;
use percent_encoding::percent_decode_str;

/// The values of a path's parameters, in order, percent-decoded. None is one that is not UTF-8.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathParams(Vec<Option<Box<str>>>);

impl PathParams {
    pub(crate) fn decode(found: &matchit::Params<'_, '_>) -> Self {
        let decode = |text: &str| percent_decode_str(text).decode_utf8().ok().map(Box::from);
        Self(found.iter().map(|(_name, value)| decode(value)).collect())
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A parameter that is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotUtf8;

/// The only parameter of a path.
#[derive(Clone, Debug)]
pub(crate) struct PathParam(pub(crate) Result<Box<str>, NotUtf8>);

/// Both parameters of a path that has two.
#[derive(Clone, Debug)]
pub(crate) struct TwoPathParams(pub(crate) Result<[Box<str>; 2], NotUtf8>);

impl<S: Sync> FromRequestParts<S> for PathParam {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(take(parts).into_iter().next().flatten().ok_or(NotUtf8)))
    }
}

impl<S: Sync> FromRequestParts<S> for TwoPathParams {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Self::Rejection> {
        let values: Option<Vec<Box<str>>> = take(parts).into_iter().collect();
        Ok(Self(values.and_then(|values| values.try_into().ok()).ok_or(NotUtf8)))
    }
}

fn take(parts: &mut Parts) -> Vec<Option<Box<str>>> {
    parts.extensions.remove::<PathParams>().unwrap_or_default().0
}
