//! Checks that the tests named in docs/security.md exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::architecture::rust_files;

const PAGE: &str = include_str!("../../../../docs/security.md");

/// Returns the names in the last column of the tables in docs/security.md.
fn documented_tests() -> Vec<&'static str> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| threat "));
    let rows = rows.filter(|line| !line.starts_with("| ---"));
    rows.flat_map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 3, "{row}");
        let names: Vec<_> = cells[2].split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test is named for this threat: {row}");
        names
    })
    .collect()
}

/// Returns every function with a test attribute, and those in `on_each_engine!`.
fn tests_in_the_sources() -> BTreeSet<String> {
    let mut files = Vec::new();
    rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut files);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut tests = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for rest in text.split("#[test]").skip(1).chain(text.split("#[tokio::test").skip(1)) {
            let name = rest.split("fn ").nth(1).and_then(|rest| rest.split(|c| !is_name(c)).next());
            tests.extend(name.map(str::to_owned));
        }
        let lists = text.split("on_each_engine!").skip(1).filter_map(|rest| rest.split(';').next());
        tests.extend(lists.flat_map(|list| list.split(|c| !is_name(c))).map(str::to_owned));
    }
    tests
}

#[test]
fn every_documented_test_exists() {
    let existing = tests_in_the_sources();
    assert!(existing.len() > 500, "only {} tests were found: the search is broken", existing.len());
    let documented = documented_tests();
    assert!(documented.len() > 40, "the parser of the tables is broken: {documented:?}");
    let missing: Vec<_> = documented.iter().filter(|name| !existing.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that do not exist: {missing:?}");
}
