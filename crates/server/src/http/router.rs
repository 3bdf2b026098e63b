//! Finds the route of a request in the table, once, and has it answered: credentials first, then the handler.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::ALLOW;
use http::{HeaderValue, Method, Request};

use super::error::{method_not_allowed, not_found};
use super::host::HostCheck;
use super::path_params::PathParams;
use super::route::{ErrorFormat, PeerUse, Route, RouteRole};
use super::sale_error::SaleError;
use super::visitor::Visitor;
use crate::app::App;
use crate::auth::credentials::Identity;
use crate::peer::Peer;

/// The label of requests that match no route.
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
    /// The methods it takes, as the header `Allow` lists them.
    allow: HeaderValue,
}

/// What the table says of a request.
pub(crate) enum RouteMatch<'a> {
    Route(&'a Route, PathParams),
    /// The path is there, and takes other methods.
    MethodNotAllowed(&'a HeaderValue, ErrorFormat),
    NotFound,
}

impl RouteMatch<'_> {
    /// The form of refusals there.
    pub(crate) const fn errors(&self) -> ErrorFormat {
        match self {
            Self::Route(route, _) => route.errors,
            Self::MethodNotAllowed(_, errors) => *errors,
            Self::NotFound => ErrorFormat::Flat,
        }
    }

    /// Whether it is answered also when all connections are taken.
    pub(crate) const fn is_in_reserve(&self) -> bool {
        matches!(self, Self::Route(Route { is_in_reserve: true, .. }, _))
    }
}

impl Router {
    /// The routes of a table that this process's roles call for.
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

    /// What callers may call this server.
    pub(crate) const fn hosts(&self) -> &HostCheck {
        &self.hosts
    }

    /// The route of a request, and the label that metrics know it by: one of a few, whatever callers ask for.
    pub(crate) fn find(&self, method: &Method, path: &str) -> (RouteMatch<'_>, &'static str) {
        let Ok(matched) = self.paths.at(path) else { return (RouteMatch::NotFound, UNMATCHED) };
        let PathRoutes { path, routes, allow } = matched.value;
        let found = match routes.iter().find(|route| route.takes(method)) {
            Some(route) => RouteMatch::Route(route, PathParams::decode(&matched.params)),
            None => RouteMatch::MethodNotAllowed(
                allow,
                routes.first().map_or(ErrorFormat::Flat, |route| route.errors),
            ),
        };
        (found, path)
    }

    /// Answers a request by what was found for it.
    pub(crate) async fn answer(
        &self,
        matched: RouteMatch<'_>,
        peer: &Peer,
        mut request: Request<Body>,
    ) -> Response {
        match matched {
            RouteMatch::Route(route, params) => match self.prepare(route, params, peer, &mut request) {
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

    /// Checks who calls, and gives the handler what its route promises. The address comes first: somebody who guesses keys
    /// may only do so as often as everybody may ask.
    fn prepare(
        &self,
        route: &Route,
        params: PathParams,
        peer: &Peer,
        request: &mut Request<Body>,
    ) -> Result<(), Box<Response>> {
        if route.peer == PeerUse::AddressLimit {
            let visitor = Visitor::admit(&self.app, peer, request.headers());
            let visitor = visitor.map_err(|error| Box::new(error.into_response()))?;
            request.extensions_mut().insert(visitor);
        }
        let identity = self.app.auth.authorize(route.credentials, request.headers());
        let identity = identity.map_err(|error| Box::new(route.errors.refuse(error)))?;
        let extensions = request.extensions_mut();
        if !matches!(identity, Identity::None) {
            extensions.insert(identity);
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
