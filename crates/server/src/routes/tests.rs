//! Checks of the route table.

use std::collections::{BTreeMap, HashSet};

use http::Method;

use super::routes;
use crate::telemetry::decisions::capability_of;

#[test]
fn no_two_routes_of_the_table_match_the_same_request() {
    let mut known = HashSet::new();
    let mut paths = matchit::Router::new();
    for route in routes() {
        assert!(known.insert((route.path, route.method.clone())), "{route:?} is listed twice");
        if !known.iter().any(|(path, method)| *path == route.path && *method != route.method) {
            paths.insert(route.path, ()).unwrap_or_else(|problem| panic!("{route:?}: {problem}"));
        }
    }
}

#[test]
fn every_route_whose_latency_is_counted_exists() {
    let known = routes();
    let counted = known.iter().filter(|route| capability_of(route.path).is_some());
    let paths: HashSet<_> = counted.map(|route| route.path).collect();
    assert_eq!(paths.len(), 9, "{paths:?}");
}

#[test]
fn a_path_that_takes_every_method_has_one_route() {
    let mut methods: BTreeMap<&str, Vec<Option<Method>>> = BTreeMap::new();
    for route in routes() {
        methods.entry(route.path).or_default().push(route.method);
    }
    for (path, methods) in methods {
        assert!(methods.len() == 1 || methods.iter().all(Option::is_some), "{path}: {methods:?}");
    }
}

#[test]
fn the_methods_of_a_path_have_one_error_format() {
    let mut formats = BTreeMap::new();
    for route in routes() {
        let format = *formats.entry(route.path).or_insert(route.errors);
        assert_eq!(format, route.errors, "{route:?}");
    }
}
