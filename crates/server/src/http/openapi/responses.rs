//! The parts of responses that follow from the route table: credentials, error formats, and errors that many routes share.

use std::collections::BTreeMap;

use utoipa::PartialSchema;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::header::{Header, HeaderBuilder};
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{HttpMethod, Ref, RefOr};

use crate::auth::credentials::{ADMIN, ADMIN_READ, Credentials};
use crate::http::error::ErrorResponse;
use crate::http::route::{ErrorFormat, PeerUse, Route};
use crate::http::sale_error::SaleErrorResponse;

/// The names of the security schemes.
pub(crate) const ADMIN_KEY: &str = "adminKey";
pub(crate) const BEARER: &str = "bearer";

const JSON: &str = "application/json";
pub(crate) const RATE_LIMIT_HEADERS: [&str; 5] =
    ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "RateLimit-Policy", "RateLimit"];

/// An error response that many routes share.
struct SharedError {
    name: &'static str,
    status: &'static str,
    about: &'static str,
}

const INVALID: SharedError = SharedError {
    name: "InvalidRequest",
    status: "400",
    about: "A parameter or field is missing, has the wrong type or is out of range, or the body is not JSON. \
            The message names the field. Nothing was changed; the same call will fail again.",
};
const NO_TOKEN: SharedError = SharedError {
    name: "NoToken",
    status: "401",
    about: "The bearer token is missing, has a wrong signature, has expired or is not valid yet. `weir token` \
            prints one.",
};
const NO_CREDENTIALS: SharedError = SharedError {
    name: "NoCredentials",
    status: "401",
    about: "There is neither the operator's key in `X-Admin-Key` nor a valid token. Nothing was done. Unless \
            `WEIR_ADMIN_KEY` is set, the key is in the data directory.",
};
const NO_SIGNATURE: SharedError = SharedError {
    name: "NoSignature",
    status: "401",
    about: "The signature is missing or wrong, or its time is more than five minutes off. Nothing was read.",
};
const NO_SCOPE: SharedError = SharedError {
    name: "NoScope",
    status: "403",
    about: "The token is valid, but lacks the scope, names no tenant where one is needed, or may only read \
            (`admin:read`). Nothing was done.",
};
const TOO_SLOW: SharedError = SharedError {
    name: "RequestTimeout",
    status: "408",
    about: "The body did not arrive within `http.read_timeout` (10 s). Nothing was done.",
};
const TOO_LARGE: SharedError = SharedError {
    name: "PayloadTooLarge",
    status: "413",
    about: "The body is larger than `http.max_body` (1 MiB). Nothing was done.",
};
const NOT_JSON: SharedError = SharedError {
    name: "UnsupportedMediaType",
    status: "415",
    about: "The body is not declared as JSON, or it is compressed. Send `Content-Type: application/json` and \
            no `Content-Encoding`.",
};
const TOO_MANY: SharedError = SharedError {
    name: "TooManyRequests",
    status: "429",
    about: "Too many calls or streams of this address (`edge.per_ip_per_second`, `edge.sse_per_ip`), or too \
            many attempts of this user to buy (`sale.user_per_second`). Nothing was done; wait `retryAfter` \
            seconds.",
};
const UNAVAILABLE: SharedError = SharedError {
    name: "DependencyUnavailable",
    status: "503",
    about: "The store did not answer in time, too many calls are waiting, or the server is shutting down. Wait \
            `Retry-After` seconds and try again. That is safe even if the first call was carried out after \
            all; a delete, discard or replay that was done already then answers 404. `/health` says which \
            engine is down.",
};
const SHARED_ERRORS: [&SharedError; 10] = [
    &INVALID,
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

/// The credentials of a route as OpenAPI security requirements. Signatures are described as header parameters instead.
pub(crate) fn security(credentials: Credentials, method: &HttpMethod) -> Vec<SecurityRequirement> {
    let token = |scope: Option<&str>| SecurityRequirement::new(BEARER, scope);
    let key = || SecurityRequirement::new(ADMIN_KEY, None::<&str>);
    match credentials {
        Credentials::Open | Credentials::Signature => Vec::new(),
        Credentials::Operator if *method == HttpMethod::Get => vec![key(), token(Some(ADMIN_READ))],
        Credentials::Operator => vec![key(), token(Some(ADMIN))],
        Credentials::OperatorOrScope(scope) => vec![key(), token(Some(scope))],
        // The empty requirement says that the others are optional.
        Credentials::AnonymousOrScope(scope) => {
            vec![SecurityRequirement::default(), key(), token(Some(scope))]
        }
        Credentials::Token => vec![token(None)],
        Credentials::Buyer => vec![SecurityRequirement::default(), token(None)],
        Credentials::Tenant(scope) => vec![token(Some(scope.as_str()))],
    }
}

/// Completes the responses that the handler names with those that follow from its route.
pub(crate) fn complete(route: &Route, operation: &mut Operation) {
    let shared_errors = shared_errors(route, operation);
    let responses = &mut operation.responses.responses;
    for (status, response) in responses.iter_mut() {
        if let RefOr::T(response) = response {
            complete_response(route.errors, route.is_page, status, response);
        }
    }
    for error in shared_errors {
        let reference = || RefOr::Ref(Ref::from_response_name(name(error, route.errors)));
        // A handler that names the same status describes it in more detail.
        responses.entry(error.status.to_owned()).or_insert_with(reference);
    }
}

fn shared_errors(route: &Route, operation: &Operation) -> Vec<&'static SharedError> {
    let body = operation.request_body.as_ref();
    let has_json = body.is_some_and(|body| matches!(body, RefOr::T(body) if body.content.contains_key(JSON)));
    let is_query = |parameter: &RefOr<_>| {
        matches!(
            parameter,
            RefOr::T(utoipa::openapi::path::Parameter { parameter_in: ParameterIn::Query, .. })
        )
    };
    let has_query = operation.parameters.iter().flatten().any(is_query);
    let mut errors: Vec<&'static SharedError> = match route.credentials {
        Credentials::Open => vec![],
        Credentials::Operator | Credentials::OperatorOrScope(_) | Credentials::AnonymousOrScope(_) => {
            vec![&NO_CREDENTIALS, &NO_SCOPE]
        }
        Credentials::Token | Credentials::Buyer => vec![&NO_TOKEN],
        Credentials::Tenant(_) => vec![&NO_TOKEN, &NO_SCOPE],
        Credentials::Signature => vec![&NO_SIGNATURE],
    };
    errors.extend((has_json || has_query).then_some(&INVALID));
    errors.extend([&TOO_SLOW, &TOO_LARGE, &NOT_JSON].into_iter().filter(|_| has_json));
    errors.extend((route.peer == PeerUse::AddressLimit).then_some(&TOO_MANY));
    errors.extend(route.can_be_unavailable.then_some(&UNAVAILABLE));
    errors
}

/// Adds the headers that the response always has and, to an error, its body, unless the handler names another body.
fn complete_response(errors: ErrorFormat, has_no_body: bool, status: &str, response: &mut Response) {
    let is_error = status.starts_with(['4', '5']);
    let is_body_final = has_no_body || !response.content.is_empty();
    if is_error && !is_body_final {
        response.content.insert(JSON.to_owned(), error_content(errors).into());
    }
    if status == "429" || (status == "503" && !is_body_final) {
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
        // `itemSchema` is a keyword of OpenAPI 3.2, so this 3.1 document has it as an extension.
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

fn name(error: &SharedError, format: ErrorFormat) -> String {
    match format {
        ErrorFormat::Flat => error.name.to_owned(),
        ErrorFormat::Sale => format!("Sale{}", error.name),
    }
}

fn error_content(errors: ErrorFormat) -> utoipa::openapi::Content {
    let schema = match errors {
        ErrorFormat::Flat => "Error",
        ErrorFormat::Sale => "SaleError",
    };
    ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build()
}

/// The shared errors that routes refer to, in both formats.
pub(crate) fn shared() -> BTreeMap<String, RefOr<Response>> {
    let both = |error: &&SharedError| {
        [ErrorFormat::Flat, ErrorFormat::Sale].map(|format| {
            let mut response = ResponseBuilder::new().description(error.about).build();
            complete_response(format, false, error.status, &mut response);
            (name(error, format), RefOr::T(response))
        })
    };
    SHARED_ERRORS.iter().flat_map(both).collect()
}

/// The schemas of error bodies.
pub(crate) fn schemas() -> [(String, RefOr<Schema>); 2] {
    [("Error".to_owned(), ErrorResponse::schema()), ("SaleError".to_owned(), SaleErrorResponse::schema())]
}

/// The headers that responses refer to.
pub(crate) fn headers() -> BTreeMap<String, RefOr<Header>> {
    let count = |minimum: u32| ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(minimum));
    let text = || ObjectBuilder::new().schema_type(Type::String);
    let header = |name: &str, about: &str, is_always_there: bool, schema: ObjectBuilder| {
        let mut header = HeaderBuilder::new().schema(Some(schema.build())).description(Some(about)).build();
        // OpenAPI has the field `required`; utoipa does not.
        header.extensions = is_always_there.then(|| Extensions::from_iter([("required", true)]));
        (name.to_owned(), RefOr::T(header))
    };
    let id = "Identifies this call in the logs: the caller's own id if it is short and plain, otherwise a new one.";
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
