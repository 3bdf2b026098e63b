//! Checks that docs/bounds.md lists every collection that outlives a call, and that the tests named there exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::architecture::rust_files;

const PAGE: &str = include_str!("../../../../docs/bounds.md");
const CRATES: [&str; 10] = [
    "core",
    "server",
    "store",
    "limiter",
    "store-sqlite",
    "store-postgres",
    "store-redis",
    "queue",
    "weir",
    "tower",
];
/// The last two are ours: `weir_store::BoundedCache` and `weir_limiter::Memory`.
const COLLECTIONS: [&str; 7] =
    ["HashMap<", "BTreeMap<", "HashSet<", "BTreeSet<", "VecDeque<", "BoundedCache<", "Memory<"];
const CHANNELS: [&str; 3] = ["mpsc::channel", "sync_channel", "broadcast::channel"];

/// Returns the sources of the process with their paths below `crates/`.
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

/// Returns the name of the collection that a line declares: a field or a type, or `channel` for a new channel.
fn declared_collection(line: &str) -> Option<String> {
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
            // The definition of the collection itself does not count.
            let definition = &rest[name.len()..];
            return COLLECTIONS
                .iter()
                .any(|collection| definition.contains(collection))
                .then(|| name.to_owned());
        }
    }
    let (name, field_type) = line.split_once(": ")?;
    // Parameters are references or follow a bracket.
    let before = COLLECTIONS
        .iter()
        .filter_map(|collection| field_type.split_once(collection))
        .map(|(before, _)| before)
        .next()?;
    let is_field =
        name.chars().all(is_name) && field_type.ends_with(',') && !before.contains(['&', '=', '(']);
    is_field.then(|| name.to_owned())
}

/// Returns the rows of the tables in docs/bounds.md: file, collection, and test.
fn documented() -> Vec<(String, String, String)> {
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
    let mut declared = BTreeSet::new();
    for (path, text) in sources().into_iter().filter(|(path, _)| !is_test(path)) {
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        declared.extend(code.lines().filter_map(declared_collection).map(|name| (path.clone(), name)));
    }
    assert!(declared.len() > 50, "{declared:?}");
    let documented: BTreeSet<(String, String)> =
        documented().into_iter().map(|(path, name, _)| (path, name)).collect();
    let missing: Vec<_> = declared.difference(&documented).collect();
    assert!(missing.is_empty(), "docs/bounds.md does not list {missing:?}");
    let removed: Vec<_> = documented.difference(&declared).collect();
    assert!(removed.is_empty(), "docs/bounds.md lists collections that do not exist: {removed:?}");
}

#[test]
fn the_tests_of_the_bounds_exist() {
    let mut files = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    CRATES.iter().for_each(|name| rust_files(&crates.join(name), &mut files));
    let sources: String = files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let is_test = |cell: &str| cell.contains('_') && !cell.contains(' ');
    let named: BTreeSet<String> =
        documented().into_iter().map(|(_, _, test)| test).filter(|test| is_test(test)).collect();
    assert!(named.len() > 20);
    for test in named {
        assert!(sources.contains(&format!("fn {test}(")), "{test}");
    }
}
