//! Builds `/openapi.json` from the route table and the handlers' annotations.
//!
//! A handler's `#[utoipa::path]` names its parameters, its bodies and its own errors. Whatever follows from its route
//! (credentials, error format, limits, outages) is added by `responses.rs`, once for all routes.

pub(crate) mod responses;
pub(crate) mod schema;

use std::collections::BTreeMap;

use utoipa::openapi::path::{Operation, PathItem, Paths};
use utoipa::openapi::schema::{Components, Schema};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    HttpMethod, InfoBuilder, LicenseBuilder, OpenApi, OpenApiBuilder, RefOr, ServerBuilder,
};

use super::route::Route;

const INTRODUCTION: &str = include_str!("../../assets/openapi.md");

/// Tags and their descriptions, in the order of the document.
pub(crate) const TAGS: [(&str, &str); 8] = [
    (
        "quota",
        "Messages per user and window. A window has a fixed length; the first send after its end starts the \
         next one.",
    ),
    (
        "slot",
        "Events per time window. Time is cut into windows of one length; every event gets a time in the window \
         it asks for, or in the first later one with room, and keeps it.",
    ),
    (
        "request",
        "Work for a downstream, once per idempotency key. It is accepted at once, and called, retried and \
         finished later.",
    ),
    (
        "tier",
        "AI calls per plan, minute and day. The day is checked first, then the minute, all or nothing; a \
         denied call spends nothing.",
    ),
    (
        "sale",
        "Units of stock, one per buyer, between two times. Responses have an envelope of their own: \
         `{\"success\":true,\"data\":…}` or `{\"success\":false,\"error\":…}`.",
    ),
    ("limits", "Limits for anyone: policies that operators define, and decisions about any key under them."),
    (
        "dead letters",
        "Messages that could not be delivered, and requests whose attempts all failed. They stay here until \
         someone replays or discards them.",
    ),
    ("operations", "Health, metrics, audits, and the description of this API."),
];

/// A handler's annotation.
pub(crate) struct Description {
    /// The annotated path, which a test compares with the route table.
    #[cfg_attr(not(test), expect(dead_code, reason = "the route table has the path"))]
    pub(crate) path: String,
    pub(crate) methods: Vec<HttpMethod>,
    operation: Operation,
    pub(crate) schemas: Vec<(String, RefOr<Schema>)>,
}

/// Reads the annotation of a handler. `utoipa`'s own `routes!` uses the same traits of `__dev`.
pub(crate) fn describe<P>() -> Description
where
    P: utoipa::Path + utoipa::__dev::SchemaReferences + utoipa::__dev::Tags<'static>,
{
    let mut schemas = Vec::new();
    P::schemas(&mut schemas);
    let mut operation = P::operation();
    operation.tags = Some(P::tags().into_iter().map(str::to_owned).collect());
    Description { path: P::path(), methods: P::methods(), operation, schemas }
}

/// Returns the document of a route table as JSON.
pub(crate) fn document(routes: &[Route]) -> Box<str> {
    build(routes).to_json().map(String::into_boxed_str).unwrap_or_else(|error| {
        tracing::error!(%error, "cannot serialize the OpenAPI document; answering with an empty one");
        "{}".into()
    })
}

fn build(routes: &[Route]) -> OpenApi {
    let mut paths = Paths::new();
    let mut components = components();
    for route in routes.iter().filter(|route| is_described(route)) {
        let Description { methods, operation, schemas, .. } = (route.describe)();
        components.schemas.extend(schemas);
        for method in &methods {
            let operation = complete(route, method, &methods, operation.clone());
            let item = PathItem::new(method.clone(), operation);
            paths.paths.entry(path_of(route)).or_default().merge_operations(item);
        }
    }
    let license = LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build();
    let info = InfoBuilder::new()
        .title("Weir")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(INTRODUCTION.trim_end()))
        .license(Some(license));
    let tag = |(name, about)| TagBuilder::new().name(name).description(Some(about)).build();
    OpenApiBuilder::new()
        .info(info.build())
        .servers(Some([ServerBuilder::new().url("/").description(Some("This server")).build()]))
        .tags(Some(TAGS.map(tag)))
        .paths(paths)
        .components(Some(components))
        .build()
}

/// Several routes share a handler that takes every method. Only the one with a wildcard path is described.
pub(crate) fn is_described(route: &Route) -> bool {
    route.method.is_some() || route.path.contains("{*")
}

/// The path as OpenAPI writes it: without wildcard parameters, which OpenAPI does not have.
pub(crate) fn path_of(route: &Route) -> String {
    route.path.replace("{*", "{")
}

/// Adds to an operation what follows from its route.
fn complete(
    route: &Route,
    method: &HttpMethod,
    methods: &[HttpMethod],
    mut operation: Operation,
) -> Operation {
    if methods.len() > 1 {
        let id = operation.operation_id.take().unwrap_or_default();
        operation.operation_id = Some(format!("{id}_{}", method_name(method)));
    }
    if matches!(method, HttpMethod::Get | HttpMethod::Delete) {
        operation.request_body = None;
    }
    operation.summary = operation.summary.map(|summary| summary.trim_end_matches('.').to_owned());
    operation.security = Some(responses::security(route.credentials, method));
    responses::complete(route, &mut operation);
    operation
}

pub(crate) const fn method_name(method: &HttpMethod) -> &'static str {
    match method {
        HttpMethod::Get => "get",
        HttpMethod::Post => "post",
        HttpMethod::Put => "put",
        HttpMethod::Delete => "delete",
        HttpMethod::Patch => "patch",
        _ => "other",
    }
}

fn components() -> Components {
    let mut components = Components::new();
    components.schemas = schema::shared().collect::<BTreeMap<_, _>>();
    components.responses = responses::shared();
    components.headers = responses::headers();
    let about_key =
        "The operator's key: `WEIR_ADMIN_KEY`, or the one generated into the data directory at first start.";
    let key = ApiKey::Header(ApiKeyValue::with_description("X-Admin-Key", about_key));
    components.add_security_scheme(responses::ADMIN_KEY, SecurityScheme::ApiKey(key));
    let about_token = "A JWT with `sub` and `exp`; `weir token --sub a@b.c` prints one. The request API also \
                       needs `tenant_id` and a `scope`: `--tenant acme --scope requests:create,requests:read`. The scope `admin` is \
                       as good as the operator's key, `admin:read` on GET.";
    let token =
        HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").description(Some(about_token));
    components.add_security_scheme(responses::BEARER, SecurityScheme::Http(token.build()));
    components
}
