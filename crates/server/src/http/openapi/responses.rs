//! What the table of routes says about responses: credentials, the form of errors, and refusals that many routes share.

use std::collections::BTreeMap;

use utoipa::PartialSchema;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::header::{Header, HeaderBuilder};
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{Ref, RefOr};

use crate::auth::credentials::Credentials;
use crate::http::error::ErrorResponse;
use crate::http::route::{ErrorFormat, PeerUse, Route};
use crate::http::sale_error::ErrorResponse as SaleErrorResponse;

/// The names of the security schemes.
pub(crate) const ADMIN_KEY: &str = "adminKey";
pub(crate) const BEARER: &str = "bearer";

const JSON: &str = "application/json";
pub(crate) const RATE_LIMIT_HEADERS: [&str; 5] =
    ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "RateLimit-Policy", "RateLimit"];

/// A refusal that many routes share.
struct Refusal {
    name: &'static str,
    status: &'static str,
    about: &'static str,
}

const INVALID: Refusal = Refusal {
    name: "InvalidRequest",
    status: "400",
    about: "A parameter or a field is missing, has the wrong type or is out of range, or the body is not JSON. \
            The message names the field. Nothing was changed; the same call will fail again.",
};
const NO_ADMIN_KEY: Refusal = Refusal {
    name: "NoAdminKey",
    status: "401",
    about: "`X-Admin-Key` is missing or wrong. Nothing was done. Unless `WEIR_ADMIN_KEY` is set, the key is in \
            the data directory.",
};
const NO_TOKEN: Refusal = Refusal {
    name: "NoToken",
    status: "401",
    about: "The bearer token is missing, has a wrong signature, has expired or is not valid yet. `weir token` \
            prints one.",
};
const NO_CREDENTIALS: Refusal = Refusal {
    name: "NoCredentials",
    status: "401",
    about: "There is neither the operator's key nor a valid token. Nothing was spent.",
};
const NO_SIGNATURE: Refusal = Refusal {
    name: "NoSignature",
    status: "401",
    about: "The signature is missing or wrong, or its time is more than five minutes off. Nothing was read.",
};
const NO_SCOPE: Refusal = Refusal {
    name: "NoScope",
    status: "403",
    about: "The token is valid, but lacks the scope, or names no tenant where one is needed. Nothing was done.",
};
const TOO_SLOW: Refusal = Refusal {
    name: "RequestTimeout",
    status: "408",
    about: "The body did not arrive within `http.read_timeout` (10 s). Nothing was done.",
};
const TOO_LARGE: Refusal = Refusal {
    name: "PayloadTooLarge",
    status: "413",
    about: "The body is larger than `http.max_body` (1 MiB). Nothing was done.",
};
const NOT_JSON: Refusal = Refusal {
    name: "UnsupportedMediaType",
    status: "415",
    about: "The body is not declared as JSON, or it is compressed. Send `Content-Type: application/json` and \
            no `Content-Encoding`.",
};
const TOO_MANY: Refusal = Refusal {
    name: "TooManyRequests",
    status: "429",
    about: "Too many calls or streams of this address (`edge.per_ip_per_second`, `edge.sse_per_ip`), or too \
            many attempts of this user to buy (`sale.user_per_second`). Nothing was done; wait `retryAfter` \
            seconds.",
};
const UNAVAILABLE: Refusal = Refusal {
    name: "DependencyUnavailable",
    status: "503",
    about: "The store did not answer in time, too many calls are waiting, or the server is shutting down. Wait \
            `Retry-After` seconds and try again. That is safe even if the first call was carried out after \
            all; a delete, discard or replay that was done already then answers 404. `/health` says which \
            engine is down.",
};
const ALL: [&Refusal; 11] = [
    &INVALID,
    &NO_ADMIN_KEY,
    &NO_TOKEN,
    &NO_CREDENTIALS,
    &NO_SIGNATURE,
    &NO_SCOPE,
    &TOO_SLOW,
    &TOO_LARGE,
    &NOT_JSON,
    &TOO_MANY,
    &UNAVAILABLE,
];

/// Which of the credentials a route takes, as OpenAPI says it. What a signature needs stands among the headers.
pub(crate) fn security(credentials: Credentials) -> Vec<SecurityRequirement> {
    let token = |scope: Option<&str>| SecurityRequirement::new(BEARER, scope);
    let key = || SecurityRequirement::new(ADMIN_KEY, None::<&str>);
    match credentials {
        Credentials::Open | Credentials::Signature => Vec::new(),
        Credentials::Operator => vec![key()],
        Credentials::OperatorOrScope(scope) => vec![key(), token(Some(scope))],
        Credentials::Token => vec![token(None)],
        Credentials::Tenant(scope) => vec![token(Some(scope.as_str()))],
    }
}

/// Adds what the line of a route says to the responses that its handler names.
pub(crate) fn complete(route: &Route, operation: &mut Operation) {
    let refusals = refusals(route, operation);
    let responses = &mut operation.responses.responses;
    for (status, response) in responses.iter_mut() {
        if let RefOr::T(response) = response {
            complete_response(route.errors, route.is_page, status, response);
        }
    }
    for refusal in refusals {
        let shared = || RefOr::Ref(Ref::from_response_name(name(refusal, route.errors)));
        responses.entry(refusal.status.to_owned()).or_insert_with(shared);
    }
}

/// The shared refusals of a route. A handler that names one of their statuses says more about it.
fn refusals(route: &Route, operation: &Operation) -> Vec<&'static Refusal> {
    let body = operation.request_body.as_ref();
    let has_json = body.is_some_and(|body| matches!(body, RefOr::T(body) if body.content.contains_key(JSON)));
    let is_query = |parameter: &RefOr<_>| {
        matches!(
            parameter,
            RefOr::T(utoipa::openapi::path::Parameter { parameter_in: ParameterIn::Query, .. })
        )
    };
    let has_query = operation.parameters.iter().flatten().any(is_query);
    let mut refusals: Vec<&'static Refusal> = match route.credentials {
        Credentials::Open => vec![],
        Credentials::Operator => vec![&NO_ADMIN_KEY],
        Credentials::OperatorOrScope(_) => vec![&NO_CREDENTIALS, &NO_SCOPE],
        Credentials::Token => vec![&NO_TOKEN],
        Credentials::Tenant(_) => vec![&NO_TOKEN, &NO_SCOPE],
        Credentials::Signature => vec![&NO_SIGNATURE],
    };
    refusals.extend((has_json || has_query).then_some(&INVALID));
    refusals.extend([&TOO_SLOW, &TOO_LARGE, &NOT_JSON].into_iter().filter(|_| has_json));
    refusals.extend((route.peer == PeerUse::AddressLimit).then_some(&TOO_MANY));
    refusals.extend(route.can_be_unavailable.then_some(&UNAVAILABLE));
    refusals
}

/// Gives a response the headers that it always has and a refusal its body, unless the handler names another.
fn complete_response(errors: ErrorFormat, has_no_body: bool, status: &str, response: &mut Response) {
    let is_error = status.starts_with(['4', '5']);
    let is_own = has_no_body || !response.content.is_empty();
    if is_error && !is_own {
        response.content.insert(JSON.to_owned(), error_content(errors).into());
    }
    if status == "429" || (status == "503" && !is_own) {
        add_header(response, "Retry-After");
    }
    if status == "401" {
        add_header(response, "WWW-Authenticate");
    }
    if response.headers.contains_key("RateLimit") {
        RATE_LIMIT_HEADERS.into_iter().for_each(|name| add_header(response, name));
    }
    add_header(response, "X-Request-Id");
    for content in response.content.values_mut() {
        // A keyword of OpenAPI 3.2, which this document may have under a name of its own only.
        if let RefOr::T(content) = content
            && let Some(item) = content.item_schema.take()
            && let Ok(item) = serde_json::to_value(item)
        {
            content.extensions = Some(Extensions::from_iter([("x-itemSchema", item)]));
        }
    }
}

fn add_header(response: &mut Response, name: &str) {
    response.headers.insert(name.to_owned(), RefOr::Ref(Ref::new(format!("#/components/headers/{name}"))));
}

fn name(refusal: &Refusal, errors: ErrorFormat) -> String {
    match errors {
        ErrorFormat::Flat => refusal.name.to_owned(),
        ErrorFormat::Sale => format!("Sale{}", refusal.name),
    }
}

fn error_content(errors: ErrorFormat) -> utoipa::openapi::Content {
    let schema = match errors {
        ErrorFormat::Flat => "Error",
        ErrorFormat::Sale => "SaleError",
    };
    ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build()
}

/// The refusals that routes refer to, in both forms.
pub(crate) fn shared() -> BTreeMap<String, RefOr<Response>> {
    let both = |refusal: &&Refusal| {
        [ErrorFormat::Flat, ErrorFormat::Sale].map(|errors| {
            let mut response = ResponseBuilder::new().description(refusal.about).build();
            complete_response(errors, false, refusal.status, &mut response);
            (name(refusal, errors), RefOr::T(response))
        })
    };
    ALL.iter().flat_map(both).collect()
}

/// The bodies of refusals.
pub(crate) fn schemas() -> [(String, RefOr<Schema>); 2] {
    [("Error".to_owned(), ErrorResponse::schema()), ("SaleError".to_owned(), SaleErrorResponse::schema())]
}

/// The headers that responses refer to.
pub(crate) fn headers() -> BTreeMap<String, RefOr<Header>> {
    let count = |minimum: u32| ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(minimum));
    let text = || ObjectBuilder::new().schema_type(Type::String);
    let header = |name: &str, about: &str, is_always_there: bool, schema: ObjectBuilder| {
        let mut header = HeaderBuilder::new().schema(Some(schema.build())).description(Some(about)).build();
        // The field is there in OpenAPI and missing in utoipa.
        header.extensions = is_always_there.then(|| Extensions::from_iter([("required", true)]));
        (name.to_owned(), RefOr::T(header))
    };
    let id = "Names this call in the logs: the caller's own id if it is plain enough, otherwise a new one.";
    let challenge = "Which credentials the route takes: `Bearer` is a token, `AdminKey` the operator's key in `X-Admin-Key`.";
    let wait = "Whole seconds to wait before the next attempt, at least 1.";
    let policy = "The limit that decided, as an IETF structured field: `q` in `w` seconds. Absent while limits \
                  are switched off.";
    let state = "What is left of it, as an IETF structured field: `r` remain, `t` seconds until more. Absent \
                 while limits are switched off.";
    let remaining = "How many are left after this call; 9223372036854775807 while limits are switched off.";
    BTreeMap::from([
        header("X-Request-Id", id, true, text().min_length(Some(1)).max_length(Some(128))),
        header("Retry-After", wait, true, count(1)),
        header("WWW-Authenticate", challenge, true, text().min_length(Some(1))),
        header("X-RateLimit-Limit", "How many are allowed in a window.", true, count(1)),
        header("X-RateLimit-Remaining", remaining, true, count(0)),
        header(
            "X-RateLimit-Reset",
            "Seconds until the window ends, or until the next call is allowed.",
            true,
            count(0),
        ),
        header("RateLimit-Policy", policy, false, text().pattern(Some("^\"[a-z]+\";q=[0-9]+;w=[0-9]+$"))),
        header("RateLimit", state, false, text().pattern(Some("^\"[a-z]+\";r=[0-9]+;t=[0-9]+$"))),
    ])
}
