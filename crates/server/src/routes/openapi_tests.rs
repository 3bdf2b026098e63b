//! Checks of the OpenAPI document that do not depend on single handlers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{openapi_document, routes};
use crate::http::openapi::{Description, TAGS, is_described, method_name, path_of, responses, schema};

fn parsed() -> Value {
    serde_json::from_str(openapi_document()).unwrap()
}

/// Calls a function with every object of the document.
fn visit<'a>(value: &'a Value, visitor: &mut impl FnMut(&'a serde_json::Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            visitor(object);
            object.values().for_each(|value| visit(value, visitor));
        }
        Value::Array(items) => items.iter().for_each(|value| visit(value, visitor)),
        _ => {}
    }
}

#[test]
fn an_annotation_has_the_path_and_the_method_of_its_route() {
    for route in routes().iter().filter(|route| is_described(route)) {
        let Description { path, methods, .. } = (route.describe)();
        assert_eq!(path, path_of(route), "{route:?}");
        if let Some(method) = &route.method {
            let names: Vec<&str> = methods.iter().map(method_name).collect();
            assert_eq!(names, [method.as_str().to_lowercase()], "{route:?}");
        }
    }
}

#[test]
fn every_reference_has_a_target() {
    let document = parsed();
    let mut count = 0;
    visit(&document, &mut |object| {
        if let Some(Value::String(reference)) = object.get("$ref") {
            let pointer = reference.strip_prefix('#').expect("references stay in the document");
            assert!(document.pointer(pointer).is_some(), "{reference} has no target");
            count += 1;
        }
    });
    assert!(count > 400, "{count}");
}

#[test]
fn every_operation_has_an_id_a_summary_a_tag_and_a_success() {
    let document = parsed();
    let tags: Vec<&str> = TAGS.iter().map(|(name, _)| *name).collect();
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let at = format!("{method} {path}");
            assert!(
                ids.insert(operation["operationId"].as_str().unwrap()),
                "{at}: another operation has the same id"
            );
            let summary = operation["summary"].as_str().unwrap();
            assert!((4..60).contains(&summary.len()) && !summary.contains('\n'), "{at}: {summary}");
            assert!(!operation["description"].as_str().unwrap().is_empty(), "{at}");
            assert!(tags.contains(&operation["tags"][0].as_str().unwrap()), "{at}");
            let statuses = operation["responses"].as_object().unwrap().keys();
            assert!(statuses.clone().any(|status| status.starts_with(['2', '3'])), "{at}");
        }
    }
    assert!(ids.len() >= routes().len());
}

#[test]
fn no_two_types_have_the_same_name_in_the_document() {
    let mut schemas: BTreeMap<String, Value> = BTreeMap::new();
    let described = routes().into_iter().filter(is_described).flat_map(|route| (route.describe)().schemas);
    for (name, schema) in schema::shared().chain(described) {
        let schema = serde_json::to_value(schema).unwrap();
        let first = schemas.entry(name.clone()).or_insert_with(|| schema.clone());
        assert_eq!(*first, schema, "{name}: give one of them another name with #[schema(as = …)]");
    }
}

#[test]
fn the_document_has_what_follows_from_the_route_table() {
    let document = parsed();
    let operation = |method: &str, path: &str| document["paths"][path][method].clone();
    let check = operation("post", "/v1/check");
    assert_eq!(check["security"].to_string(), r#"[{"adminKey":[]},{"bearer":["limits:check"]}]"#);
    for status in ["400", "401", "403", "404", "408", "413", "415", "503"] {
        assert!(check["responses"].get(status).is_some(), "{status}");
    }
    let of_operator = |method: &str| operation(method, "/admin/tiers/{tier}")["security"].to_string();
    assert_eq!(of_operator("get"), r#"[{"adminKey":[]},{"bearer":["admin:read"]}]"#);
    assert_eq!(of_operator("put"), r#"[{"adminKey":[]},{"bearer":["admin"]}]"#);
    let send = operation("post", "/api/send");
    assert_eq!(send["security"].to_string(), r#"[{},{"adminKey":[]},{"bearer":["quota:send"]}]"#);
    let product = operation("get", "/api/v1/products/{sku}");
    assert_eq!(product["responses"]["401"]["$ref"], "#/components/responses/SaleNoCredentials");
    let error = &product["responses"]["404"]["content"]["application/json"]["schema"]["$ref"];
    assert_eq!(error, "#/components/schemas/SaleError");
    assert!(operation("get", "/sale/{file}")["responses"]["404"].get("content").is_none());
    assert!(operation("get", "/livez")["responses"].get("503").is_none());
    let limited = &operation("post", "/api/send")["responses"]["429"]["headers"];
    for header in responses::RATE_LIMIT_HEADERS.iter().chain(&["Retry-After", "X-Request-Id"]) {
        assert!(limited.get(header).is_some(), "{header}");
    }
}
