//! The route table: the only list of routes. The router, metrics labels, credential checks and `/openapi.json` derive from it.

use std::sync::OnceLock;

use axum::handler::Handler;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, Method};
use weir_core::request::Scope;

use crate::auth::credentials::Credentials::{
    AnonymousOrScope, Buyer, Open, Operator, OperatorOrScope, Signature, Tenant, Token,
};
use crate::auth::credentials::{Credentials, LIMITS_CHECK, QUOTA_CONFIGURE, QUOTA_SEND, SLOTS_ASSIGN};
use crate::console::routes as console;
use crate::gateway::routes as gateway;
use crate::http::openapi;
use crate::http::openapi::describe;
use crate::http::route::Route;
use crate::operations::routes as operations;
use crate::operations::routes::{audit, dead_letters, queue, readiness};
use crate::quota::routes as quota;
use crate::request::routes as request;
use crate::sale::routes as sale;
use crate::slot::routes as slot;
use crate::tier::routes as tier;

/// `route!(POST "/api/send", SEND, quota::send_message)` is a route with its handler and the handler's `#[utoipa::path]`.
/// That attribute defines a type beside the handler, with the prefix `__path_`.
macro_rules! route {
    (@description [$($module:ident ::)*] $handler:ident) => { pastey::paste! { $($module ::)* [<__path_ $handler>] } };
    (@description [$($module:ident ::)*] $next:ident :: $($rest:tt)+) => {
        route!(@description [$($module ::)* $next ::] $($rest)+)
    };
    (@method ANY) => { None };
    (@method $method:ident) => { Some(Method::$method) };
    ($method:ident $path:literal, $credentials:expr, $($handler:tt)+) => {
        Route::new(
            route!(@method $method),
            $path,
            $credentials,
            |request, app| $($handler)+.call(request, app),
            describe::<route!(@description [] $($handler)+)>,
        )
    };
}

const CHECK: Credentials = OperatorOrScope(LIMITS_CHECK);
const CONFIGURE: Credentials = AnonymousOrScope(QUOTA_CONFIGURE);
const SEND: Credentials = AnonymousOrScope(QUOTA_SEND);
const ASSIGN: Credentials = AnonymousOrScope(SLOTS_ASSIGN);
const CREATE: Credentials = Tenant(Scope::Create);
const READ: Credentials = Tenant(Scope::Read);

#[must_use]
pub fn routes() -> Vec<Route> {
    [quota(), slot(), request(), tier(), policies(), sale(), admin(), operations()].concat()
}

fn quota() -> Vec<Route> {
    vec![
        route!(POST "/api/config", CONFIGURE, quota::configure_quota),
        route!(GET "/api/config", CONFIGURE, quota::list_quotas),
        route!(GET "/api/config/{userId}", CONFIGURE, quota::get_quota),
        route!(DELETE "/api/config/{userId}", CONFIGURE, quota::delete_quota),
        route!(POST "/api/send", SEND, quota::send_message),
    ]
}

fn slot() -> Vec<Route> {
    vec![
        route!(POST "/api/v1/slots", ASSIGN, slot::assign_slot),
        route!(GET "/api/v1/slots", ASSIGN, slot::list_slots),
        route!(POST "/api/v1/slots/bulk", ASSIGN, slot::bulk::assign_slots).never_unavailable(),
        route!(POST "/api/v1/slots/forecast", ASSIGN, slot::forecast_slots),
        route!(GET "/api/v1/slots/windows", ASSIGN, slot::list_windows),
        route!(GET "/api/v1/slots/{eventId}", ASSIGN, slot::get_slot),
        route!(PUT "/api/v1/slots/{eventId}", ASSIGN, slot::move_slot),
        route!(DELETE "/api/v1/slots/{eventId}", ASSIGN, slot::give_slot_back),
        route!(POST "/admin/rate-limit/config", Operator, slot::config::put_config),
        route!(GET "/admin/rate-limit/config", Operator, slot::config::list_configs),
        route!(GET "/admin/rate-limit/config/{name}", Operator, slot::config::get_config),
        route!(GET "/admin/rate-limit/config/{name}/versions", Operator, slot::config::list_versions),
        route!(DELETE "/admin/rate-limit/config/{name}", Operator, slot::config::deactivate_config),
        route!(POST "/admin/rate-limit/cache/flush", Operator, slot::config::flush_cache).never_unavailable(),
    ]
}

fn request() -> Vec<Route> {
    vec![
        route!(POST "/v1/requests", CREATE, request::submit::create_request),
        route!(GET "/v1/requests", READ, request::list_requests),
        route!(GET "/v1/requests/{requestId}", READ, request::get_request).watching_peer(),
        route!(GET "/v1/requests/{requestId}/events", READ, request::events::watch_request),
        route!(POST "/v1/requests/{requestId}/cancel", CREATE, request::cancel::cancel_request),
        route!(POST "/v1/requests/{requestId}/callback", Signature, request::callback::call_back),
        route!(GET "/v1/webhook-secret", READ, request::webhook_secret::get_webhook_secret)
            .never_unavailable(),
        route!(GET "/admin/requests", Operator, request::operators::list_all_requests),
        route!(GET "/admin/requests/unfinished", Operator, request::operators::list_unfinished_requests),
        route!(POST "/admin/requests/cancel", Operator, request::operators::cancel_requests),
        route!(GET "/admin/requests/{requestId}", Operator, request::operators::get_any_request),
        route!(GET "/admin/request/rollout", Operator, request::rollout::get_rollout),
        route!(PUT "/admin/request/rollout", Operator, request::rollout::put_rollout),
        route!(GET "/admin/tenants/{tenant}/limits", Operator, request::tenants::get_tenant_limit),
        route!(PUT "/admin/tenants/{tenant}/limits", Operator, request::tenants::put_tenant_limit),
        route!(DELETE "/admin/tenants/{tenant}/limits", Operator, request::tenants::delete_tenant_limit),
        route!(DELETE "/admin/tenants/{tenant}/data", Operator, request::tenants::erase_tenant),
    ]
}

fn tier() -> Vec<Route> {
    vec![
        route!(ANY "/api/v1/ai", Token, gateway::forward_call).watching_peer(),
        route!(ANY "/api/v1/ai/", Token, gateway::forward_call).watching_peer(),
        route!(ANY "/api/v1/ai/{*path}", Token, gateway::forward_call).watching_peer(),
        route!(GET "/api/v1/limits/me", Token, tier::get_my_limits),
        route!(GET "/admin/subscriptions", Operator, tier::list_subscriptions),
        route!(GET "/admin/subscriptions/{user}", Operator, tier::get_subscription),
        route!(PUT "/admin/subscriptions/{user}", Operator, tier::put_subscription),
        route!(DELETE "/admin/subscriptions/{user}", Operator, tier::delete_subscription),
        route!(GET "/admin/tiers", Operator, tier::list_tiers).never_unavailable(),
        route!(GET "/admin/tiers/{tier}", Operator, tier::get_tier).never_unavailable(),
        route!(PUT "/admin/tiers/{tier}", Operator, tier::put_tier),
        route!(DELETE "/admin/tiers/{tier}", Operator, tier::reset_tier),
        route!(GET "/admin/rate-limit/enabled", Operator, tier::get_enabled).never_unavailable(),
        route!(PUT "/admin/rate-limit/enabled", Operator, tier::put_enabled),
    ]
}

fn policies() -> Vec<Route> {
    vec![
        route!(GET "/admin/policies", Operator, tier::policy::list_policies).never_unavailable(),
        route!(GET "/admin/policies/{name}", Operator, tier::policy::get_policy).never_unavailable(),
        route!(PUT "/admin/policies/{name}", Operator, tier::policy::put_policy),
        route!(DELETE "/admin/policies/{name}", Operator, tier::policy::delete_policy),
        route!(DELETE "/admin/policies/{name}/keys/{key}", Operator, tier::policy::reset_key),
        route!(POST "/v1/check", CHECK, tier::check::check_limits),
        route!(POST "/v1/refund", CHECK, tier::check::refund_limit),
        route!(POST "/v1/hold", CHECK, tier::hold::hold_limit),
        route!(POST "/v1/settle", CHECK, tier::hold::settle_hold),
        route!(POST "/v1/release", CHECK, tier::release::release_permit),
    ]
}

fn sale() -> Vec<Route> {
    let routes = vec![
        route!(GET "/api/v1/sales", Open, sale::get_sale),
        route!(GET "/api/v1/sales/events", Open, sale::events::watch_sales),
        route!(POST "/api/v1/purchases", Buyer, sale::purchases::create_purchase).of_attempts(),
        route!(GET "/api/v1/purchases", Buyer, sale::purchases::get_purchase),
        route!(POST "/api/v1/products", Operator, sale::products::create_product),
        route!(GET "/api/v1/products", Operator, sale::products::list_products),
        route!(GET "/api/v1/products/{sku}", Operator, sale::products::get_product),
        route!(PUT "/api/v1/products/{sku}", Operator, sale::products::change_product),
        route!(DELETE "/api/v1/products/{sku}", Operator, sale::products::delete_product),
        route!(POST "/api/v1/products/{sku}/end", Operator, sale::products::end_sale),
        route!(POST "/api/v1/products/{sku}/extend", Operator, sale::products::extend_sale),
        route!(GET "/api/v1/products/{sku}/purchases", Operator, sale::product_purchases::list_product_purchases),
    ];
    // For operators, in the flat format like other routes under /admin.
    let anomalies =
        route!(GET "/admin/sale/anomalies", Operator, sale::anomalies::list_anomalies).never_unavailable();
    routes.into_iter().chain(sale_page()).map(Route::of_sale).chain([anomalies]).collect()
}

fn sale_page() -> impl Iterator<Item = Route> {
    let routes = [
        route!(GET "/sale", Open, sale::assets::redirect_to_page),
        route!(GET "/sale/", Open, sale::assets::get_page),
        route!(GET "/sale/{file}", Open, sale::assets::get_page_file),
        route!(GET "/sale/assets/{file}", Open, sale::assets::get_page_asset),
    ];
    routes.into_iter().map(Route::of_page)
}

/// Operators' routes that concern all capabilities and their queues.
fn admin() -> Vec<Route> {
    vec![
        route!(GET "/admin/dlq", Operator, dead_letters::list_dead_letters),
        route!(POST "/admin/dlq/replay", Operator, dead_letters::replay_dead_letters),
        route!(GET "/admin/dlq/groups", Operator, dead_letters::groups::group_dead_letters),
        route!(GET "/admin/dlq/{id}", Operator, dead_letters::get_dead_letter),
        route!(DELETE "/admin/dlq/{id}", Operator, dead_letters::discard_dead_letter),
        route!(POST "/admin/dlq/{id}/replay", Operator, dead_letters::replay_dead_letter),
        route!(POST "/admin/queue/claim", Operator, queue::claim_messages).watching_peer(),
        route!(POST "/admin/queue/settle", Operator, queue::settle_messages),
        route!(GET "/admin/audit", Operator, audit::audit_books),
        route!(GET "/admin/live", Operator, console::watch_live).never_unavailable(),
        route!(GET "/admin/near-limits", Operator, console::list_near_limits).never_unavailable(),
        route!(GET "/admin/servers", Operator, console::list_servers),
        route!(GET "/admin/keys/{key}", Operator, console::keys::get_key),
    ]
}

fn operations() -> Vec<Route> {
    let routes = vec![
        route!(GET "/health", Open, operations::get_health).in_reserve(),
        route!(GET "/livez", Open, operations::get_livez).in_reserve(),
        route!(GET "/readyz", Open, readiness::get_readyz).in_reserve(),
        route!(GET "/readyz/{capability}", Open, readiness::get_capability_readyz).in_reserve(),
        route!(GET "/metrics", Open, operations::get_metrics).in_reserve(),
        route!(GET "/openapi.json", Open, get_openapi),
        route!(GET "/docs", Open, operations::get_docs),
        route!(GET "/", Open, operations::get_index),
    ];
    let assets = std::iter::once(route!(GET "/assets/{file}", Open, operations::get_index_asset).of_page());
    routes.into_iter().chain(assets).map(Route::of_any_role).map(Route::never_unavailable).collect()
}

/// The OpenAPI document of the table as JSON. It is built on the first call; only the text is kept in memory.
#[must_use]
pub fn openapi_document() -> &'static str {
    static DOCUMENT: OnceLock<Box<str>> = OnceLock::new();
    DOCUMENT.get_or_init(|| openapi::document(&routes()))
}

/// Get this description.
///
/// This document: OpenAPI 3.1, for client generators and tools.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "operations",
    responses(
        (
            status = 200,
            description = "The description of the routes of this server.",
            body = Object, content_type = "application/json",
        ),
    ),
)]
pub(crate) async fn get_openapi() -> ([(HeaderName, &'static str); 2], &'static str) {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-cache")], openapi_document())
}

#[cfg(test)]
mod openapi_tests;
#[cfg(test)]
mod tests;
