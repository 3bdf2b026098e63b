//! Every route. What all of them have in common is in [`envelope`](super::envelope).

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::handler::Handler;
use axum::response::Response;
use axum::routing::{MethodRouter, any, delete, get, post};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Method;

use super::caller::Caller;
use super::serve::introduce;
use super::{ai, audit, dead_letters, error, operations, queue, quota, request, sale, slot, tier};
use crate::app::App;
use crate::proxy::Payload;

type Route = (&'static str, MethodRouter<Arc<App>>);

/// The routes of the API.
fn api() -> Vec<Route> {
    vec![
        // quota
        ("/api/config", post(quota::configure_quota)),
        ("/api/config/{userId}", get(quota::get_quota).delete(quota::delete_quota)),
        ("/api/send", post(quota::send_message)),
        // slot
        ("/api/v1/slots", post(slot::assign_slot)),
        ("/api/v1/slots/bulk", post(slot::bulk::assign_slots)),
        ("/api/v1/slots/forecast", post(slot::forecast_slots)),
        ("/api/v1/slots/windows", get(slot::list_windows)),
        ("/api/v1/slots/{eventId}", get(slot::get_slot).delete(slot::give_slot_back)),
        ("/admin/rate-limit/config", post(slot::config::put_config).get(slot::config::list_configs)),
        (
            "/admin/rate-limit/config/{name}",
            get(slot::config::get_config).delete(slot::config::deactivate_config),
        ),
        ("/admin/rate-limit/cache/flush", post(slot::config::flush_cache)),
        // request
        ("/v1/requests", post(request::submit::create_request).get(request::list_requests)),
        ("/v1/requests/{requestId}", get(request::get_request)),
        ("/v1/requests/{requestId}/events", get(request::events::watch_request)),
        ("/v1/requests/{requestId}/callback", post(request::callback::call_back)),
        ("/admin/request/rollout", get(request::rollout::get_rollout).put(request::rollout::put_rollout)),
        // tier
        ("/api/v1/ai", any(ai::pass_on)),
        ("/api/v1/ai/", any(ai::pass_on)),
        ("/api/v1/ai/{*path}", any(ai::pass_on)),
        (
            "/admin/subscriptions/{user}",
            get(tier::get_subscription).put(tier::put_subscription).delete(tier::delete_subscription),
        ),
        ("/admin/tiers", get(tier::list_tiers)),
        ("/admin/tiers/{tier}", get(tier::get_tier).put(tier::put_tier)),
        ("/api/v1/limits/me", get(tier::get_my_limits)),
        // limits for anyone
        ("/admin/policies", get(tier::policy::list_policies)),
        (
            "/admin/policies/{name}",
            get(tier::policy::get_policy).put(tier::policy::put_policy).delete(tier::policy::delete_policy),
        ),
        ("/admin/policies/{name}/keys/{key}", delete(tier::policy::reset_key)),
        ("/v1/check", post(tier::check::check_limits)),
        ("/v1/refund", post(tier::check::refund_limit)),
        ("/v1/hold", post(tier::hold::hold_limit)),
        ("/v1/settle", post(tier::hold::settle_hold)),
        // dead letters
        ("/admin/dlq", get(dead_letters::list_dead_letters)),
        ("/admin/dlq/replay", post(dead_letters::replay_all_dead_letters)),
        ("/admin/dlq/{id}", get(dead_letters::get_dead_letter).delete(dead_letters::discard_dead_letter)),
        ("/admin/dlq/{id}/replay", post(dead_letters::replay_dead_letter)),
        // due slots
        ("/admin/queue/claim", post(queue::claim_messages)),
        ("/admin/queue/settle", post(queue::settle_messages)),
        // the books
        ("/admin/audit", get(audit::audit_books)),
    ]
}

/// The routes of sale, whose refusals have an envelope of their own.
fn sale() -> Vec<Route> {
    vec![
        ("/api/v1/sales", get(sale::get_sale)),
        ("/api/v1/sales/events", get(sale::events::watch_sales)),
        ("/api/v1/purchases", post(sale::purchases::create_purchase).get(sale::purchases::get_purchase)),
        ("/api/v1/products", post(sale::products::create_product).get(sale::products::list_products)),
        (
            "/api/v1/products/{sku}",
            get(sale::products::get_product)
                .put(sale::products::change_product)
                .delete(sale::products::delete_product),
        ),
        ("/sale", get(sale::page::redirect_to_page)),
        ("/sale/", get(sale::page::get_page)),
        ("/sale/{file}", get(sale::page::get_page_file)),
        ("/sale/assets/{file}", get(sale::page::get_page_asset)),
    ]
}

/// What every process answers, whatever its roles.
fn operations() -> Vec<Route> {
    vec![
        ("/health", get(operations::get_health)),
        ("/livez", get(operations::get_livez)),
        ("/readyz", get(operations::get_readyz)),
        ("/metrics", get(operations::get_metrics)),
        ("/openapi.json", get(operations::get_openapi)),
        ("/docs", get(operations::get_docs)),
        ("/", get(operations::get_index)),
    ]
}

/// A route that is called all the time, and answered on the short way.
pub(super) struct Short {
    pub(super) path: &'static str,
    handler: ShortHandler,
}

/// Who answers there.
enum ShortHandler {
    /// The handler of the route.
    Routed(fn(Request, Arc<App>) -> BoxFuture<'static, Response>),
    /// Whoever answers AI calls, who wants the body as it came.
    Ai,
}

impl Short {
    const fn new(path: &'static str, call: fn(Request, Arc<App>) -> BoxFuture<'static, Response>) -> Self {
        Self { path, handler: ShortHandler::Routed(call) }
    }
}

/// The routes that are called all the time. Each is also among the others, with the same handler, for the calls that do not come
/// by the short way. None has names in its path.
static SHORT: [(Method, Short); 9] = [
    (Method::POST, Short::new("/api/send", |request, app| quota::send_message.call(request, app))),
    (Method::POST, Short::new("/api/v1/slots", |request, app| slot::assign_slot.call(request, app))),
    (
        Method::POST,
        Short::new("/v1/requests", |request, app| request::submit::create_request.call(request, app)),
    ),
    (Method::POST, Short::new("/v1/check", |request, app| tier::check::check_limits.call(request, app))),
    (Method::POST, Short::new("/v1/refund", |request, app| tier::check::refund_limit.call(request, app))),
    (Method::POST, Short::new("/v1/settle", |request, app| tier::hold::settle_hold.call(request, app))),
    (Method::GET, Short::new("/api/v1/sales", |request, app| sale::get_sale.call(request, app))),
    (
        Method::GET,
        Short::new("/api/v1/purchases", |request, app| sale::purchases::get_purchase.call(request, app)),
    ),
    (
        Method::POST,
        Short::new("/api/v1/purchases", |request, app| sale::purchases::create_purchase.call(request, app)),
    ),
];

/// Calls that are passed on, whatever they ask for.
static AI: Short = Short { path: "/api/v1/ai/{*path}", handler: ShortHandler::Ai };

/// The routes of a process, and the names under which metrics know them.
#[derive(Clone)]
pub struct Routes {
    pub(super) router: Router,
    labels: Arc<matchit::Router<&'static str>>,
    app: Arc<App>,
}

impl Routes {
    /// The routes this process's roles call for.
    #[must_use]
    pub fn new(app: &Arc<App>) -> Self {
        let mut routes = operations();
        if app.settings.process.roles.api {
            routes.extend(api());
            routes.extend(sale().into_iter().map(|(path, methods)| (path, sale::in_envelope(methods))));
        }
        let (mut router, mut labels) = (Router::new(), matchit::Router::new());
        for (path, methods) in routes {
            labels
                .insert(path, path)
                .expect("no two routes are the same; the router would not take them either");
            router = router.route(path, methods);
        }
        let router = router
            .method_not_allowed_fallback(error::method_not_allowed)
            .fallback(error::not_found)
            .with_state(Arc::clone(app));
        Self { router, labels: Arc::new(labels), app: Arc::clone(app) }
    }

    /// The pattern a path matches: one of a few, whatever callers ask for.
    #[must_use]
    pub fn label(&self, path: &str) -> &'static str {
        self.labels.at(path).map_or("unmatched", |matched| *matched.value)
    }

    /// The route of such a call on the short way, if it has one.
    pub(super) fn short(&self, method: &Method, path: &str) -> Option<&'static Short> {
        if !self.app.settings.process.roles.api {
            return None;
        }
        if path.strip_prefix(ai::PREFIX).is_some_and(|rest| rest.starts_with('/')) {
            return Some(&AI);
        }
        let mut routes = SHORT.iter();
        routes.find(|(takes, short)| short.path == path && takes == method).map(|(_, short)| short)
    }

    /// Has the handler of a route answer.
    pub(super) fn call_short<'a>(
        &'a self,
        short: &Short,
        request: http::Request<Bytes>,
        caller: &'a Caller,
    ) -> BoxFuture<'a, Response> {
        match short.handler {
            ShortHandler::Ai => Box::pin(ai::answer(&self.app, Some(caller), request.map(Payload::Whole))),
            ShortHandler::Routed(call) => {
                let body = |bytes: Bytes| if bytes.is_empty() { Body::empty() } else { Body::from(bytes) };
                let mut request = request.map(body);
                introduce(caller, &mut request);
                call(request, Arc::clone(&self.app))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_has_a_short_way_has_the_long_one_too() {
        let paths: Vec<&str> = api().into_iter().chain(sale()).map(|(path, _)| path).collect();
        for short in SHORT.iter().map(|(_, short)| short).chain([&AI]) {
            assert!(paths.contains(&short.path), "{}", short.path);
        }
    }
}
