//! Compares the tables and walks of ARCHITECTURE.md with the sources, and checks that core stays pure and that capabilities log
//! only through their events.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const ARCHITECTURE: &str = include_str!("../../../../ARCHITECTURE.md");
const SERVER_MODULES: &str = include_str!("../../../../docs/design/modules.md");

/// Returns the rows of a table on a page, in order: | `name` | what it is | `dependency`, `dependency` |
fn table_of_dependencies(page: &str, header: &str) -> Vec<(String, BTreeSet<String>)> {
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let table = page.lines().skip_while(|line| !line.starts_with(header));
    let rows = table.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').collect();
        let name = names(cells[0]).into_iter().next().expect("a name");
        (name, names(cells[2]))
    })
    .collect()
}

/// Adds every Rust file below a directory to `files`.
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

/// Returns the innermost listed module that contains a path.
fn module_of<'a>(path: &str, modules: &'a BTreeSet<String>) -> Option<&'a str> {
    let is_in = |module: &&String| path == **module || path.starts_with(&format!("{module}::"));
    modules.iter().filter(is_in).max_by_key(|module| module.len()).map(String::as_str)
}

/// Returns the paths after every `crate::` and `super::` of a source file, relative to the crate's root.
fn paths_used(text: &str, parent: &str) -> Vec<String> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut paths = Vec::new();
    for (keyword, base) in [("crate::", ""), ("super::", parent)] {
        for rest in text.split(keyword).skip(1) {
            let (path, after) = rest.split_at(rest.find(|c| !is_path(c)).unwrap_or(rest.len()));
            let group = after.strip_prefix('{').and_then(|group| group.split('}').next());
            match group {
                Some(items) => {
                    paths.extend(items.split(',').map(|item| format!("{base}{path}{}", item.trim())));
                }
                // `super::*` in the tests of a file is the file itself.
                None if path.is_empty() => {}
                None => paths.push(format!("{base}{path}")),
            }
        }
    }
    paths
}

/// Returns the listed modules of `weir-server` and the modules that the files of each use.
fn server_modules(listed: &BTreeSet<String>) -> BTreeMap<String, BTreeSet<String>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src");
    let mut files = Vec::new();
    rust_files(&sources, &mut files);
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files {
        let path = file.strip_prefix(&sources).unwrap().with_extension("");
        let path = path.to_str().unwrap().replace('/', "::");
        if path == "lib" {
            continue;
        }
        let module =
            module_of(&path, listed).unwrap_or_else(|| panic!("{path} is in no module of the table"));
        let parent = path.rsplit_once("::").map_or_else(String::new, |(parent, _)| format!("{parent}::"));
        let text = std::fs::read_to_string(&file).unwrap();
        let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap()).collect();
        let paths = paths_used(&code.join("\n"), &parent);
        let used = paths.iter().filter_map(|path| module_of(path.trim_end_matches(':'), listed));
        let others = used.filter(|other| *other != module).map(str::to_owned);
        modules.entry(module.to_owned()).or_default().extend(others);
    }
    modules
}

#[test]
fn server_modules_depend_on_each_other_as_documented_and_without_cycles() {
    let table = table_of_dependencies(SERVER_MODULES, "| module of `weir-server` ");
    let mut above = BTreeSet::new();
    for (module, dependencies) in &table {
        assert!(dependencies.is_subset(&above), "{module} depends on modules below it in the table");
        above.insert(module.clone());
    }
    let graph = server_modules(&above);
    for (module, dependencies) in &table {
        assert_eq!(
            Some(dependencies),
            graph.get(module),
            "left: the dependencies of {module} in docs/design/modules.md"
        );
    }
    assert_eq!(graph.len(), table.len());
}

/// Modules of the server whose log lines are all written by their `events.rs`.
const MODULES_WITH_EVENTS: [&str; 7] = ["gateway", "operations", "quota", "request", "sale", "slot", "tier"];

/// Those of which some files still count beside their events.
const MODULES_THAT_COUNT_BESIDE: [&str; 1] = ["sale"];

/// Whether code logs: a macro of `tracing`, or an import that would let it be called without the crate's name.
fn logs(code: &str) -> bool {
    let macros = ["trace", "debug", "info", "warn", "error", "event"];
    code.contains("use tracing::") || macros.iter().any(|name| code.contains(&format!("tracing::{name}!")))
}

/// Whether code moves a counter of its capability.
fn counts(code: &str) -> bool {
    let moves = ["inc(", "inc_by(", "observe(", "record_", "record(", "count_"];
    let mut calls = code.split("metrics.").skip(1).filter_map(|rest| {
        // The path of fields behind it, up to the call: `metrics.denied.inc(`, `metrics.record_send(`.
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))?;
        rest[end..].starts_with('(').then(|| &rest[..=end])
    });
    calls.any(|call| {
        let method = call.rsplit('.').next().unwrap();
        moves.iter().any(|name| method.starts_with(name))
    })
}

#[test]
fn capabilities_log_and_count_only_through_their_events() {
    assert!(counts("self.metrics.denied.inc();") && counts("metrics.record_send(&outcome)"));
    assert!(!counts("metrics.quota.clone()") && !counts("use super::metrics::QuotaMetrics;"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src");
    for module in MODULES_WITH_EVENTS {
        let mut files = vec![sources.join(format!("{module}.rs"))];
        rust_files(&sources.join(module), &mut files);
        let events = sources.join(module).join("events.rs");
        assert!(files.contains(&events), "{module} has no events.rs");
        for file in files {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let is_test =
                name.ends_with("tests") || file.components().any(|part| part.as_os_str() == "tests");
            if is_test || file == events {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            assert!(!logs(code), "{} logs; move the line to {module}/events.rs", file.display());
            assert!(
                name == "metrics" || !counts(code) || MODULES_THAT_COUNT_BESIDE.contains(&module),
                "{} counts; let an event of {module}/events.rs do it, with its log line",
                file.display()
            );
        }
    }
}

/// Returns the steps of the walks in ARCHITECTURE.md: each file with the functions named after it.
fn steps_of_the_walks() -> Vec<(String, Vec<String>)> {
    let walks = ARCHITECTURE.split("\n## One send").nth(1).expect("the walks are the last part of the page");
    let mut steps: Vec<(String, Vec<String>)> = Vec::new();
    for name in walks.split('`').skip(1).step_by(2) {
        if name.ends_with(".rs") {
            steps.push((name.to_owned(), Vec::new()));
        } else if let Some((_, functions)) = steps.last_mut()
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        {
            functions.push(name.to_owned());
        }
    }
    steps
}

#[test]
fn each_walk_touches_at_most_12_files() {
    for title in ["One send", "One AI call"] {
        let walk = ARCHITECTURE.split(&format!("\n## {title}")).nth(1).expect("the walk");
        let steps = walk.split("\n\n").find(|paragraph| paragraph.starts_with("1. ")).expect("its steps");
        let files: BTreeSet<_> =
            steps.split('`').skip(1).step_by(2).filter(|name| name.ends_with(".rs")).collect();
        assert!(files.len() > 5 && files.len() <= 12, "{title}: {files:?}");
    }
}

#[test]
fn the_files_and_functions_of_the_walks_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let steps = steps_of_the_walks();
    assert!(steps.len() > 20, "{steps:?}");
    for (file, functions) in steps {
        assert!(!functions.is_empty(), "{file} is named without a function");
        let text =
            std::fs::read_to_string(crates.join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        for function in functions {
            let is_there =
                text.contains(&format!("fn {function}(")) || text.contains(&format!("fn {function}<"));
            assert!(is_there, "{file} has no function {function}");
        }
    }
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
fn crates_depend_on_each_other_as_documented() {
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
    assert_eq!(
        table_of_dependencies(ARCHITECTURE, "| crate ").into_iter().collect::<BTreeMap<_, _>>(),
        graph
    );
}

#[test]
fn core_depends_on_no_async_clock_or_io_crate() {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let core = packages.iter().find(|package| package["name"] == "weir-core").unwrap();
    let allowed = BTreeSet::from(["base64", "hmac", "sha2", "thiserror", "uuid"].map(str::to_owned));
    assert_eq!(normal_dependencies(core), allowed);
    let uuid = core["dependencies"].as_array().unwrap().iter().find(|d| d["name"] == "uuid").unwrap();
    assert_eq!((&uuid["uses_default_features"], &uuid["features"]), (&false.into(), &serde_json::json!([])));
}
