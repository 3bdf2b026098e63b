//! Every collection that outlives a call is listed in docs/bounds.md, and the tests that are named there exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::architecture::rust_files;

const PAGE: &str = include_str!("../../../../docs/bounds.md");
const CRATES: [&str; 9] =
    ["server", "store", "limiter", "store-sqlite", "store-postgres", "store-redis", "queue", "weir", "tower"];
/// The last two are ours: `weir_store::BoundedCache` and `weir_limiter::Memory`.
const COLLECTIONS: [&str; 7] =
    ["HashMap<", "BTreeMap<", "HashSet<", "BTreeSet<", "VecDeque<", "BoundedCache<", "Memory<"];
const CHANNELS: [&str; 3] = ["mpsc::channel", "sync_channel", "broadcast::channel"];

/// The sources of the process, each by its path below `crates/`.
fn sources() -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    CRATES.iter().for_each(|name| rust_files(&crates.join(name).join("src"), &mut files));
    let name = |path: &Path| path.strip_prefix(&crates).unwrap().to_str().unwrap().to_owned();
    files.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

fn is_test(path: &str) -> bool {
    path.contains("/tests") || path.ends_with("_tests.rs")
}

/// The name of the collection that a line declares: a field, a type, or a channel that is made.
fn declared(line: &str) -> Option<String> {
    let line = line.trim();
    if line.starts_with("//") || line.starts_with("use ") {
        return None;
    }
    if CHANNELS
        .iter()
        .any(|channel| line.contains(&format!("{channel}(")) || line.contains(&format!("{channel}::<")))
    {
        return Some("channel".to_owned());
    }
    if !COLLECTIONS.iter().any(|collection| line.contains(collection)) {
        return None;
    }
    let line = match line.split_once("pub(").and_then(|(_, rest)| rest.split_once(") ")) {
        Some((_, rest)) if line.starts_with("pub(") => rest,
        _ => line.strip_prefix("pub ").unwrap_or(line),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for keyword in ["struct ", "type "] {
        if let Some(rest) = line.strip_prefix(keyword) {
            let name = rest.split(|c| !is_name(c)).next()?;
            // Not the collection's own definition.
            let of = &rest[name.len()..];
            return COLLECTIONS.iter().any(|collection| of.contains(collection)).then(|| name.to_owned());
        }
    }
    let (name, of) = line.split_once(": ")?;
    // Parameters are references or stand behind a bracket.
    let before = COLLECTIONS
        .iter()
        .filter_map(|collection| of.split_once(collection))
        .map(|(before, _)| before)
        .next()?;
    let is_field = name.chars().all(is_name) && of.ends_with(',') && !before.contains(['&', '=', '(']);
    is_field.then(|| name.to_owned())
}

/// Rows of the page's tables: where, which, and the test.
fn listed() -> Vec<(String, String, String)> {
    let cells = |row: &str| -> Vec<String> {
        row.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let rows = PAGE.lines().filter(|line| line.starts_with("| `")).map(cells);
    // Only the first table has tests.
    rows.map(|cells| (cells[0].clone(), cells[1].clone(), cells.get(5).cloned().unwrap_or_default()))
        .collect()
}

#[test]
fn every_collection_that_outlives_a_call_is_listed_with_its_bound() {
    let mut found = BTreeSet::new();
    for (path, text) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        found.extend(code.lines().filter_map(declared).map(|name| (path.clone(), name)));
    }
    assert!(found.len() > 50, "{found:?}");
    let listed: BTreeSet<(String, String)> =
        listed().into_iter().map(|(path, name, _)| (path, name)).collect();
    let missing: Vec<_> = found.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/bounds.md does not list {missing:?}");
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "docs/bounds.md lists what is not there: {gone:?}");
}

#[test]
fn the_tests_of_the_bounds_exist() {
    let mut files = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    CRATES.iter().for_each(|name| rust_files(&crates.join(name), &mut files));
    let sources: String = files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let is_test = |cell: &str| cell.contains('_') && !cell.contains(' ');
    let named: BTreeSet<String> =
        listed().into_iter().map(|(_, _, test)| test).filter(|test| is_test(test)).collect();
    assert!(named.len() > 20);
    for test in named {
        assert!(sources.contains(&format!("fn {test}(")), "{test}");
    }
}
