//! The graphs of crates and of the server's modules are those ARCHITECTURE.md draws, and core stays pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const PAGE: &str = include_str!("../../../../ARCHITECTURE.md");

/// The rows of one of the page's tables, in order: | `name` | what | `dependency`, `dependency` |
fn table_on_the_page(header: &str) -> Vec<(String, BTreeSet<String>)> {
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let table = PAGE.lines().skip_while(|line| !line.starts_with(header));
    let rows = table.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').collect();
        let name = names(cells[0]).into_iter().next().expect("a name");
        (name, names(cells[2]))
    })
    .collect()
}

/// Every Rust file below a directory.
pub(crate) fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The modules at the top of `weir-server`, and which others the files of each name as `crate::module`.
fn modules_of_the_server() -> BTreeMap<String, BTreeSet<String>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src");
    let mut files = Vec::new();
    rust_files(&sources, &mut files);
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files {
        let first = file.strip_prefix(&sources).unwrap().components().next().unwrap();
        let module = Path::new(first.as_os_str()).file_stem().unwrap().to_str().unwrap().to_owned();
        if module == "lib" {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let named = text.split("crate::").skip(1).map(|rest| rest.split(|c| !is_name(c)).next().unwrap());
        modules.entry(module).or_default().extend(named.map(str::to_owned));
    }
    for (module, dependencies) in &mut modules {
        dependencies.remove(module);
    }
    modules
}

#[test]
fn modules_of_the_server_depend_on_each_other_as_the_page_says_and_never_in_a_circle() {
    let table = table_on_the_page("| module of `weir-server` ");
    let mut above = BTreeSet::new();
    for (module, dependencies) in &table {
        assert!(dependencies.is_subset(&above), "{module} depends on modules that stand below it");
        above.insert(module.clone());
    }
    assert_eq!(table.into_iter().collect::<BTreeMap<_, _>>(), modules_of_the_server());
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
    assert_eq!(table_on_the_page("| crate ").into_iter().collect::<BTreeMap<_, _>>(), graph);
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
