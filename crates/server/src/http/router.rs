//! Answers one request: gives it an id, finds its route in the table, checks its credentials, runs the handler, and counts the
//! response. A handler that panics is answered with 500.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{ALLOW, CONNECTION, TRANSFER_ENCODING, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};

use super::error::{ApiError, method_not_allowed, not_found};
use super::extract::{PathParams, Visitor};
use super::host::HostCheck;
use super::route::{ErrorFormat, PeerUse, Route, RouteRole};
use super::sale_error::SaleError;
use crate::app::App;
use crate::auth::credentials::{Identity, Operator};
use crate::peer::Peer;
use crate::telemetry::metrics::Shortage;
use crate::telemetry::request_context::{self, Caller, RequestContext};

/// The header with the request's id, in requests and responses.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_MAX: usize = 128;

/// The metrics label of requests that match no route.
const UNMATCHED: &str = "unmatched";

/// The routes that this process answers.
pub(crate) struct Router {
    paths: matchit::Router<PathRoutes>,
    hosts: HostCheck,
    app: Arc<App>,
}

/// The routes of one path.
struct PathRoutes {
    path: &'static str,
    routes: Vec<Route>,
    /// The methods that the path takes, as the header `Allow` lists them.
    allow: HeaderValue,
}

/// The result of looking up a request in the table.
enum RouteMatch<'a> {
    Route(&'a Route, PathParams),
    /// The path exists, but does not take the request's method.
    MethodNotAllowed(&'a HeaderValue, ErrorFormat),
    NotFound,
}

impl RouteMatch<'_> {
    const fn error_format(&self) -> ErrorFormat {
        match self {
            Self::Route(route, _) => route.errors,
            Self::MethodNotAllowed(_, errors) => *errors,
            Self::NotFound => ErrorFormat::Flat,
        }
    }

    /// Whether connections of the reserve may ask for it.
    const fn is_in_reserve(&self) -> bool {
        matches!(self, Self::Route(Route { is_in_reserve: true, .. }, _))
    }
}

impl Router {
    /// Takes the routes of the table that this process's roles call for.
    ///
    /// # Panics
    /// When two routes of the table match the same path, which a test of the table rules out.
    #[must_use]
    pub(crate) fn new(table: Vec<Route>, app: &Arc<App>) -> Self {
        let has_api = app.settings.process.roles.api;
        let mut by_path: BTreeMap<&'static str, Vec<Route>> = BTreeMap::new();
        for route in table.into_iter().filter(|route| has_api || route.role == RouteRole::Any) {
            by_path.entry(route.path).or_default().push(route);
        }
        let mut paths = matchit::Router::new();
        for (path, routes) in by_path {
            let allow = allow(&routes);
            paths
                .insert(path, PathRoutes { path, routes, allow })
                .expect("no two paths of the table match the same request");
        }
        Self { paths, hosts: HostCheck::new(&app.settings.process), app: Arc::clone(app) }
    }

    /// Answers one request. This wraps the handlers here and not as a layer of each, which would cost every request two
    /// allocations and a copy.
    pub(crate) async fn answer<B>(&self, peer: &Peer, mut request: Request<B>) -> Response
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        let started = Instant::now();
        let method = request.method().clone();
        let id = request_id(request.headers().get(REQUEST_ID));
        if request.headers().get(REQUEST_ID) != Some(&id) {
            // Handlers log the id that the response carries.
            request.headers_mut().insert(REQUEST_ID, id.clone());
        }
        let context = RequestContext::new(request.headers(), id.clone());
        let trace_id = context.trace_id();
        let (matched, route) = self.find(&method, request.uri().path());
        let mut span = context.begin_span(&method, route);
        let errors = matched.error_format();
        let admitted = self.admit(peer, &matched, &request);
        let answered = async {
            match admitted {
                Ok(()) => self.dispatch(matched, peer, request.map(Body::new)).await,
                Err(refusal) => errors.refuse(refusal),
            }
        };
        let mut response = match AssertUnwindSafe(context.scope(answered)).catch_unwind().await {
            Ok(response) => response,
            Err(_panic) => {
                let id = id.to_str().unwrap_or_default();
                tracing::error!(
                    httpRequestId = id, traceId = %trace_id, route, "a handler panicked; answered 500"
                );
                errors.refuse(ApiError::internal())
            }
        };
        let headers = response.headers_mut();
        headers.insert(REQUEST_ID, id);
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        self.app.metrics.record_request(&method, route, response.status(), started.elapsed());
        if let Some(span) = &mut span {
            span.describe("http.response.status_code", response.status().as_str().to_owned());
            if response.status().is_server_error() {
                span.fail();
            }
        }
        response
    }

    /// Whether a request is answered even when all ordinary connections are taken.
    pub(crate) fn is_in_reserve<B>(&self, request: &Request<B>) -> bool {
        self.find(request.method(), request.uri().path()).0.is_in_reserve()
    }

    /// Refuses a request that there are no resources for, in the format of its route.
    pub(crate) fn refuse<B>(&self, request: &Request<B>, error: ApiError) -> Response {
        let (matched, route) = self.find(request.method(), request.uri().path());
        let mut response = matched.error_format().refuse(error);
        response.headers_mut().insert(REQUEST_ID, request_id(request.headers().get(REQUEST_ID)));
        self.app.metrics.record_request(request.method(), route, response.status(), Duration::ZERO);
        response
    }

    /// Finds the route of a request and its metrics label, one of a fixed set.
    fn find(&self, method: &Method, path: &str) -> (RouteMatch<'_>, &'static str) {
        let Ok(matched) = self.paths.at(path) else { return (RouteMatch::NotFound, UNMATCHED) };
        let PathRoutes { path, routes, allow } = matched.value;
        let route = match routes.iter().find(|route| route.accepts(method)) {
            Some(route) => RouteMatch::Route(route, PathParams::decode(&matched.params)),
            None => RouteMatch::MethodNotAllowed(
                allow,
                routes.first().map_or(ErrorFormat::Flat, |route| route.errors),
            ),
        };
        (route, path)
    }

    /// Checks what every request must fulfil, whatever its route.
    fn admit<B>(&self, peer: &Peer, matched: &RouteMatch<'_>, request: &Request<B>) -> Result<(), ApiError> {
        if !has_plain_framing(request.headers()) {
            let refusal =
                ApiError::invalid("Transfer-Encoding must be chunked, once, or not be there at all");
            return Err(refusal.with_header(CONNECTION, HeaderValue::from_static("close")));
        }
        self.hosts.check(request)?;
        if peer.is_in_reserve() && !matched.is_in_reserve() && !peer.leave_reserve() {
            self.app.metrics.record_shortage(Shortage::Connections);
            return Err(ApiError::out_of_connections());
        }
        Ok(())
    }

    async fn dispatch(&self, matched: RouteMatch<'_>, peer: &Peer, mut request: Request<Body>) -> Response {
        match matched {
            RouteMatch::Route(route, params) => match self.prepare(route, params, peer, &mut request).await {
                Ok(()) => (route.endpoint)(request, Arc::clone(&self.app)).await,
                Err(refusal) => *refusal,
            },
            RouteMatch::MethodNotAllowed(allow, errors) => {
                let mut response = match errors {
                    ErrorFormat::Flat => method_not_allowed().into_response(),
                    ErrorFormat::Sale => SaleError::method_not_allowed().into_response(),
                };
                response.headers_mut().insert(ALLOW, allow.clone());
                response
            }
            RouteMatch::NotFound => not_found().into_response(),
        }
    }

    /// Checks the credentials and inserts what the handler extracts (`extract.rs`). The address limit comes first, so that
    /// it also limits callers who guess keys.
    async fn prepare(
        &self,
        route: &Route,
        params: PathParams,
        peer: &Peer,
        request: &mut Request<Body>,
    ) -> Result<(), Box<Response>> {
        if route.peer == PeerUse::AddressLimit {
            let visitor = Visitor::admit(&self.app, peer, request.headers(), route.is_attempt).await;
            let visitor = visitor.map_err(|error| Box::new(error.into_response()))?;
            request.extensions_mut().insert(visitor);
        }
        let identity = self.app.auth.authorize(route.credentials, request.method(), request.headers()).await;
        let identity = identity.map_err(|error| Box::new(route.errors.refuse(error)))?;
        let extensions = request.extensions_mut();
        match identity {
            Identity::None => {}
            Identity::Operator(Operator { scope, tenant }) => {
                request_context::set_caller(Caller { scope, tenant })
            }
            identity => drop(extensions.insert(identity)),
        }
        if !params.is_empty() {
            extensions.insert(params);
        }
        if route.peer == PeerUse::Connection {
            extensions.insert(peer.clone());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").finish_non_exhaustive()
    }
}

fn allow(routes: &[Route]) -> HeaderValue {
    let methods = routes.iter().filter_map(|route| route.method.as_ref());
    let names: Vec<&str> =
        methods.map(|method| if method == Method::GET { "GET,HEAD" } else { method.as_str() }).collect();
    HeaderValue::from_str(&names.join(",")).unwrap_or(HeaderValue::from_static(""))
}

/// Whether the body comes as it is or in chunks. hyper decodes chunks and leaves other transfer codings in place, where no
/// reader would notice them.
fn has_plain_framing(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().eq_ignore_ascii_case(b"chunked"),
        (Some(_), Some(_)) => false,
    }
}

/// Returns the caller's id if it is short and plain enough for logs and headers, otherwise a new one.
fn request_id(from_caller: Option<&HeaderValue>) -> HeaderValue {
    let is_plain = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=REQUEST_ID_MAX).contains(&bytes.len())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=".contains(b))
    };
    from_caller.filter(is_plain).cloned().unwrap_or_else(new_request_id)
}

pub(crate) fn new_request_id() -> HeaderValue {
    let id = uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
    let mut text = uuid::Uuid::encode_buffer();
    HeaderValue::from_str(id.hyphenated().encode_lower(&mut text)).unwrap_or(HeaderValue::from_static("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_request_id_is_used_and_any_other_replaced() {
        let plain = HeaderValue::from_static("trace-1:2/3_4.5");
        assert_eq!(request_id(Some(&plain)), plain);
        let long = HeaderValue::from_str(&"x".repeat(129)).unwrap();
        for bad in [
            HeaderValue::from_static(""),
            HeaderValue::from_static("a b"),
            HeaderValue::from_static("a\"b"),
            long,
        ] {
            let id = request_id(Some(&bad));
            assert_ne!(id, bad);
            assert_eq!(id.len(), 36);
        }
        assert_ne!(request_id(None), request_id(None));
    }
}
