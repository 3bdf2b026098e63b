//! Checks every response that a test's [`Client`](weir_testkit::http::Client) receives against the OpenAPI document: route,
//! status, content type, required headers, and the schema of the body.
//!
//! Not checked: everything under `/api/v1/ai`, whose upstreams may answer anything; bodies that are not JSON; clients that are
//! `unchecked`; and bytes that tests read from sockets themselves.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use http::Method;
use jsonschema::{Registry, Validator};
use parking_lot::Mutex;
use serde_json::{Value, json};
use weir_server::http::route::ErrorFormat;
use weir_server::routes::openapi_document;
use weir_server::routes::routes;
use weir_testkit::http::{Response, check_every_response};

/// The URI of the document in the schema registry.
const DOCUMENT: &str = "urn:weir:openapi";
/// The start of the message for a path without a route.
const UNMATCHED: &str = "There is nothing at this path";

static CONTRACT: LazyLock<Contract> = LazyLock::new(Contract::read);

struct Contract {
    document: Value,
    schemas: Registry<'static>,
    /// The path as the document writes it, and the format of its errors.
    paths: matchit::Router<(String, ErrorFormat)>,
    /// By JSON pointer, compiled on first use.
    validators: Mutex<HashMap<String, Arc<Validator>>>,
}

/// Checks every response that clients of this process receive from now on.
pub(crate) fn enforce() {
    check_every_response(|method, path, response| {
        if let Err(problem) = CONTRACT.check(method, path, response) {
            let body = String::from_utf8_lossy(&response.body);
            panic!("{method} {path} answered {}, and {problem}:\n{body}", response.status);
        }
    });
}

impl Contract {
    fn read() -> Self {
        let document: Value = serde_json::from_str(openapi_document()).expect("the document is JSON");
        let schemas = Registry::new().add(DOCUMENT, document.clone()).and_then(|schemas| schemas.prepare());
        let mut paths = matchit::Router::new();
        for route in routes() {
            // Fails for a path with several methods after the first one.
            let _ = paths.insert(route.path, (route.path.replace("{*", "{"), route.errors));
        }
        let schemas = schemas.expect("the document has schemas");
        Self { document, schemas, paths, validators: Mutex::default() }
    }

    fn check(&self, method: &Method, path: &str, response: &Response) -> Result<(), String> {
        let path = path.split(['?', '#']).next().unwrap_or_default();
        if path.starts_with("/api/v1/ai") {
            return Ok(());
        }
        let Ok(matched) = self.paths.at(path) else {
            return self.check_error(ErrorFormat::Flat, response, 404);
        };
        let (path, errors) = matched.value;
        // A process without the role `api` has no such route.
        if response.status == 404
            && response.body.windows(UNMATCHED.len()).any(|part| part == UNMATCHED.as_bytes())
        {
            return self.check_error(ErrorFormat::Flat, response, 404);
        }
        let documented = if method == Method::HEAD { Method::GET } else { method.clone() };
        let item = format!("/paths/{}", escape(path));
        let operation = format!("{item}/{}", documented.as_str().to_lowercase());
        if self.document.pointer(&operation).is_none() {
            return self.check_error(*errors, response, 405);
        }
        let at = self.follow(format!("{operation}/responses/{}", response.status));
        let at = at.ok_or("the document does not have that status")?;
        self.check_headers(&at, response)?;
        if method == Method::HEAD { Ok(()) } else { self.check_body(&at, response) }
    }

    /// Checks the error for a request that matches no operation.
    fn check_error(&self, errors: ErrorFormat, response: &Response, status: u16) -> Result<(), String> {
        if response.status != status {
            return Err(format!("only {status} is expected there"));
        }
        let name = if errors == ErrorFormat::Flat { "Error" } else { "SaleError" };
        if response.body.is_empty() {
            Ok(())
        } else {
            self.validate(&format!("/components/schemas/{name}"), &json_of(response)?)
        }
    }

    fn check_body(&self, at: &str, response: &Response) -> Result<(), String> {
        let content = format!("{at}/content");
        let Some(Value::Object(types)) = self.document.pointer(&content) else {
            return if response.body.is_empty() {
                Ok(())
            } else {
                Err("the document has no body for this response".to_owned())
            };
        };
        let full = response.header("content-type").ok_or("there is no content type")?;
        let essence = full.split(';').next().unwrap_or_default().trim();
        if !types.contains_key(essence) {
            return Err(format!("the document does not have the content type {full} for this response"));
        }
        if essence != "application/json" {
            return Ok(());
        }
        self.validate(&format!("{content}/{}/schema", escape(essence)), &json_of(response)?)
    }

    fn check_headers(&self, at: &str, response: &Response) -> Result<(), String> {
        let headers = self.document.pointer(&format!("{at}/headers")).and_then(Value::as_object);
        for name in headers.into_iter().flat_map(|headers| headers.keys()) {
            let at = self
                .follow(format!("{at}/headers/{}", escape(name)))
                .ok_or("the reference of a header has no target")?;
            let Some(text) = response.header(name) else {
                match self.document.pointer(&format!("{at}/required")) {
                    Some(Value::Bool(true)) => return Err(format!("the header {name} is missing")),
                    _ => continue,
                }
            };
            let schema = format!("{at}/schema");
            let kind = self.document.pointer(&format!("{schema}/type")).and_then(Value::as_str);
            let value = match kind {
                Some("integer" | "boolean") => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
                _ => json!(text),
            };
            self.validate(&schema, &value).map_err(|problem| format!("the header {name}: {problem}"))?;
        }
        Ok(())
    }

    fn validate(&self, pointer: &str, value: &Value) -> Result<(), String> {
        let validator = {
            let mut validators = self.validators.lock();
            let compile = || {
                let fragment = pointer.replace('{', "%7B").replace('}', "%7D");
                let schema = json!({"$ref": format!("{DOCUMENT}#{fragment}")});
                let options =
                    jsonschema::options().with_registry(&self.schemas).should_validate_formats(true);
                Arc::new(
                    options
                        .build(&schema)
                        .unwrap_or_else(|error| panic!("{pointer} is not a schema: {error}")),
                )
            };
            Arc::clone(validators.entry(pointer.to_owned()).or_insert_with(compile))
        };
        validator.validate(value).map_err(|error| format!("{} is wrong: {error}", error.instance_path()))
    }

    /// Returns the target of a reference at `pointer`, or `pointer` itself.
    fn follow(&self, pointer: String) -> Option<String> {
        let value = self.document.pointer(&pointer)?;
        match value.get("$ref").and_then(Value::as_str) {
            Some(reference) => Some(reference.trim_start_matches('#').to_owned()),
            None => Some(pointer),
        }
    }
}

fn json_of(response: &Response) -> Result<Value, String> {
    serde_json::from_slice(&response.body).map_err(|error| format!("the body is not JSON: {error}"))
}

/// Escapes a key for a JSON pointer.
fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn response(status: u16, body: &str) -> Response {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        headers.insert("x-request-id", HeaderValue::from_static("id"));
        Response { status, headers, body: body.to_owned().into() }
    }

    #[test]
    fn responses_that_differ_from_the_document_are_reported() {
        let check = |method: Method, path: &str, response: Response| CONTRACT.check(&method, path, &response);
        let quota = r#"{"userId":"u","rateLimit":1,"timeWindow":1,"currentCount":0,"lastRefreshTime":"2026-01-01T00:00:00Z"}"#;
        check(Method::GET, "/api/config/u?x=y", response(200, quota)).unwrap();
        for (path, status, body, problem) in [
            ("/api/config/u", 200, "{}", "is wrong"),
            ("/api/config/u", 200, &quota.replace("rateLimit\":1", "rateLimit\":0"), "/rateLimit is wrong"),
            ("/api/config/u", 200, &quota.replace("2026", "long ago"), "/lastRefreshTime is wrong"),
            ("/api/config/u", 200, "nonsense", "not JSON"),
            ("/api/config/u", 418, "{}", "does not have that status"),
            ("/nowhere", 200, "{}", "only 404"),
            ("/api/send", 200, "{}", "only 405"),
        ] {
            let reported = check(Method::GET, path, response(status, body)).unwrap_err();
            assert!(reported.contains(problem), "{path}: {reported}");
        }
        let mut without_id = response(200, quota);
        without_id.headers.remove("x-request-id");
        let reported = check(Method::GET, "/api/config/u", without_id).unwrap_err();
        assert!(reported.contains("X-Request-Id is missing"), "{reported}");
    }
}
