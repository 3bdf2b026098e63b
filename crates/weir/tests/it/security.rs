//! The tests that docs/security.md names as proof exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::architecture::rust_files;

const PAGE: &str = include_str!("../../../../docs/security.md");

/// The names in the last column of the page's tables of threats.
fn tests_on_the_page() -> Vec<&'static str> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| threat "));
    let rows = rows.filter(|line| !line.starts_with("| ---"));
    rows.flat_map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 3, "{row}");
        let names: Vec<_> = cells[2].split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test shows this: {row}");
        names
    })
    .collect()
}

/// Every function behind an attribute that makes it a test, and those that `on_each_engine!` makes tests of.
fn tests_in_the_sources() -> BTreeSet<String> {
    let mut files = Vec::new();
    rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut files);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut tests = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for behind in text.split("#[test]").skip(1).chain(text.split("#[tokio::test").skip(1)) {
            let name = behind.split("fn ").nth(1).and_then(|rest| rest.split(|c| !is_name(c)).next());
            tests.extend(name.map(str::to_owned));
        }
        let lists = text.split("on_each_engine!").skip(1).filter_map(|rest| rest.split(';').next());
        tests.extend(lists.flat_map(|list| list.split(|c| !is_name(c))).map(str::to_owned));
    }
    tests
}

#[test]
fn every_test_that_the_page_names_exists() {
    let existing = tests_in_the_sources();
    assert!(existing.len() > 500, "only {} tests were found: the sources are read wrongly", existing.len());
    let named = tests_on_the_page();
    assert!(named.len() > 40, "the tables are read wrongly: {named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !existing.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that are not there: {missing:?}");
}
