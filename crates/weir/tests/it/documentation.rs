//! Checks that the documents name every metric and every path of the API. Tables of single pages are checked elsewhere
//! (`architecture.rs`, `audit.rs`, `bounds.rs`, `deploy.rs`, `security.rs`).

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use weir_server::routes::openapi_document;

use crate::architecture::rust_files;
use crate::fixtures::{Running, Store};

/// The engines whose calls have a histogram.
const ENGINES: [&str; 5] = ["sqlite", "postgresql", "redis", "redis_sale", "kafka"];
/// Names that begin as those of metrics do.
const TABLES: [&str; 2] = ["weir_schema", "weir_schema_state"];

/// Appends the text of every page below a directory.
fn add_pages(directory: &Path, text: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_pages(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
            text.push('\n');
        }
    }
}

/// Returns the text of all pages in `docs/`.
fn pages() -> String {
    let mut text = String::new();
    add_pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs"), &mut text);
    text
}

/// Returns the name under which a metric is registered: without the suffix that a counter has when it is shown.
pub(crate) fn family(name: &str) -> String {
    name.strip_suffix("_total").unwrap_or(name).to_owned()
}

/// Returns the families of metrics that the sources register. `/metrics` shows those with labels only once they have a value.
pub(crate) fn registered_families() -> BTreeSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for name in ["server", "store"] {
        rust_files(&crates.join(name).join("src"), &mut files);
    }
    let mut families: BTreeSet<String> =
        ENGINES.iter().map(|engine| format!("weir_{engine}_call_seconds")).collect();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let registrations = text.split(".register(").skip(1);
        let names = registrations.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        families.extend(names.map(|name| format!("weir_{name}")));
    }
    families
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_is_documented_and_every_documented_metric_exists() {
    let registered = registered_families();
    let running = Running::start(Store::Embedded).await;
    let response = running.client().get("/metrics").await.unwrap();
    let metrics = String::from_utf8(response.body.to_vec()).unwrap();
    let names = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let shown: BTreeSet<String> = names.map(family).collect();
    assert!(shown.len() > 20, "{shown:?}");
    let overlooked: Vec<_> = shown.difference(&registered).collect();
    assert!(overlooked.is_empty(), "the search for registered metrics overlooks {overlooked:?}");

    let text = pages();
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let documented: BTreeSet<String> =
        words.filter(|word| word.starts_with("weir_") && !TABLES.contains(word)).map(family).collect();
    let missing: Vec<_> = registered.difference(&documented).collect();
    assert!(missing.is_empty(), "no page in docs/ names {missing:?}; docs/alerts.md has a table for them");
    let removed: Vec<_> = documented.difference(&registered).collect();
    assert!(removed.is_empty(), "docs/ names metrics that do not exist: {removed:?}");
}

fn segments(path: &str) -> Vec<&str> {
    path.split('/').filter(|segment| !segment.is_empty()).collect()
}

/// Returns what looks like a path on a page, as segments. `…/{sku}/end` begins with the segment `…`.
fn written_paths(text: &str) -> BTreeSet<Vec<&str>> {
    let ends_a_word = |c: char| c.is_whitespace() || "`\"'()[]|<>,;".contains(c);
    let words = text.split(ends_a_word).filter(|word| word.contains('/'));
    let paths = words.map(|word| {
        let path = match word.split_once("://") {
            Some((_, rest)) => rest.find('/').map_or("", |start| &rest[start..]),
            None => word,
        };
        let path = path.split(['?', '#']).next().unwrap_or_default();
        path.trim_end_matches(['.', ':'])
    });
    paths.filter(|path| path.starts_with(['/', '…'])).map(segments).collect()
}

/// Whether a page means this path: a placeholder stands for any segment, and `…` for what comes before.
fn is_meant(path: &[&str], written: &[&str]) -> bool {
    let (path, written) = match written {
        ["…", end @ ..] if !end.is_empty() && end.len() < path.len() => {
            (&path[path.len() - end.len()..], end)
        }
        _ => (path, written),
    };
    let is_same = |(segment, written): (&&str, &&str)| segment == written || segment.starts_with('{');
    path.len() == written.len() && path.iter().zip(written).all(is_same)
}

#[test]
fn every_path_of_the_api_is_on_some_page() {
    let document: Value = serde_json::from_str(openapi_document()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 40, "{paths:?}");
    let text = pages();
    let mut written = written_paths(&text);
    let mut missing = Vec::new();
    // What is the name of one path says nothing of another with a placeholder there: `/admin/dlq/replay`, `/admin/dlq/{id}`.
    let named: BTreeSet<Vec<&str>> =
        paths.keys().map(|path| segments(path)).filter(|path| written.remove(path)).collect();
    for path in paths.keys().map(|path| segments(path)).filter(|path| !named.contains(path)) {
        if !written.iter().any(|written| is_meant(&path, written)) {
            missing.push(path.join("/"));
        }
    }
    assert!(missing.is_empty(), "no page in docs/ names these paths: {missing:?}");
}
