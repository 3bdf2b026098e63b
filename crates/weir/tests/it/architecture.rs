//! The crate graph is the one ARCHITECTURE.md draws, and core stays pure.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

const PAGE: &str = include_str!("../../../../ARCHITECTURE.md");

/// The rows of the page's table of crates: | `name` | what | `dep`, `dep` |
fn graph_on_the_page() -> BTreeMap<String, BTreeSet<String>> {
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let rows = PAGE.lines().filter(|line| line.starts_with("| `weir"));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').collect();
        let name = names(cells[0]).into_iter().next().expect("a name");
        (name, names(cells[2]))
    })
    .collect()
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn normal_dependencies(package: &Value) -> BTreeSet<String> {
    let all = package["dependencies"].as_array().unwrap().iter();
    all.filter(|dependency| dependency["kind"].is_null())
        .map(|dependency| dependency["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn crates_depend_on_each_other_as_the_page_says() {
    let metadata = metadata();
    let members: BTreeMap<_, _> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|package| package["source"].is_null())
        .map(|package| (package["name"].as_str().unwrap().to_owned(), normal_dependencies(package)))
        .collect();
    let names: BTreeSet<_> = members.keys().cloned().collect();
    let graph: BTreeMap<_, _> = members
        .into_iter()
        .map(|(name, dependencies)| {
            (name, dependencies.intersection(&names).cloned().collect::<BTreeSet<_>>())
        })
        .collect();
    assert_eq!(graph_on_the_page(), graph);
}

#[test]
fn core_depends_on_nothing_that_waits_reads_clocks_or_does_io() {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let core = packages.iter().find(|package| package["name"] == "weir-core").unwrap();
    let allowed = BTreeSet::from(["base64", "hmac", "sha2", "thiserror", "uuid"].map(str::to_owned));
    assert_eq!(normal_dependencies(core), allowed);
    let uuid = core["dependencies"].as_array().unwrap().iter().find(|d| d["name"] == "uuid").unwrap();
    assert_eq!((&uuid["uses_default_features"], &uuid["features"]), (&false.into(), &serde_json::json!([])));
}
