//! Checks the dashboards in `deploy/grafana`: they are what their script writes, Prometheus can read every query, every metric
//! exists, and every alert is shown somewhere. `stack.rs` runs the queries.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::deploy::service;
use crate::documentation::{family, registered_families};

const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");
/// Where a query asks for the interval of its chart, the value that it gets here.
const INTERVAL: &str = "5m";

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/grafana")
}

/// Returns each dashboard with the name of its file, in the order of the names.
fn dashboards() -> Vec<(String, Value)> {
    let files = std::fs::read_dir(directory().join("dashboards")).unwrap();
    let mut dashboards: Vec<(String, Value)> = files
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap())
        })
        .collect();
    dashboards.sort_by(|a, b| a.0.cmp(&b.0));
    dashboards
}

/// Returns the panels that show something: no headings.
fn panels(dashboard: &Value) -> Vec<&Value> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    panels.filter(|panel| panel["type"] != "row").collect()
}

/// Returns the queries of all panels and annotations, each with the name of its dashboard, as Prometheus gets them.
pub(crate) fn all_queries() -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for (name, dashboard) in dashboards() {
        let targets = panels(&dashboard).into_iter().flat_map(|panel| panel["targets"].as_array().unwrap());
        let annotations = dashboard["annotations"]["list"].as_array().unwrap();
        for query in targets.chain(annotations) {
            let query = query["expr"].as_str().unwrap().replace("$__rate_interval", INTERVAL);
            queries.push((name.clone(), query));
        }
    }
    queries
}

/// Returns the names of Weir's metrics in a query, without those of recording rules (`weir:…`).
pub(crate) fn metric_names(query: &str) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = query.split(|c| !is_name(c)).filter(|word| word.starts_with("weir_"));
    words.map(str::to_owned).collect()
}

/// Returns the family of a series: histograms have three kinds.
fn family_of_series(name: &str) -> String {
    let histogram = ["_bucket", "_count", "_sum"].into_iter().find_map(|suffix| name.strip_suffix(suffix));
    histogram
        .filter(|family| family.ends_with("_seconds") || family.ends_with("_size"))
        .map_or_else(|| family(name), str::to_owned)
}

/// Fails unless Prometheus can parse all expressions and every metric in them exists.
pub(crate) fn assert_queries_can_be_asked(queries: &[(String, String)]) {
    let families = registered_families();
    for (name, query) in queries {
        for metric in metric_names(query) {
            assert!(families.contains(&family_of_series(&metric)), "{name} asks for {metric}: {query}");
        }
        let recorded = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
        for recorded in recorded.filter(|word| word.starts_with("weir:")) {
            assert!(ALERTS.contains(&format!("- record: {recorded}\n")), "{name} asks for {recorded}");
        }
    }
    if weir_testkit::skip("prometheus") {
        return;
    }
    let promtool = weir_testkit::promtool().unwrap_or_else(|why| {
        panic!("cannot find promtool: {why}. Install Debian's package prometheus, or set WEIR_TEST_SKIP=prometheus")
    });
    // JSON is YAML.
    let rules = queries.iter().enumerate();
    let rules: Vec<Value> =
        rules.map(|(i, (_, query))| json!({"record": format!("query:{i}"), "expr": query})).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    let groups = json!({"groups": [{"name": "queries", "rules": rules}]});
    std::fs::write(file.path(), groups.to_string()).unwrap();
    let output = Command::new(promtool).args(["check", "rules"]).arg(file.path()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains(&format!("{} rules found", queries.len())), "{stdout}");
}

#[test]
fn the_dashboards_are_those_that_their_script_writes() {
    if weir_testkit::skip("python") {
        return;
    }
    let script = directory().join("dashboards.py");
    let output = Command::new("python3").arg("-B").arg(script).arg("--check").output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn prometheus_can_read_every_query_of_the_dashboards_and_every_metric_exists() {
    let queries = all_queries();
    assert!(queries.len() > 100, "{}", queries.len());
    assert_queries_can_be_asked(&queries);
}

#[test]
fn every_capability_has_a_dashboard_and_each_is_provisioned_with_its_datasource() {
    let dashboards = dashboards();
    let names: Vec<&str> = dashboards.iter().map(|(name, _)| name.as_str()).collect();
    let expected =
        ["engines", "gateway", "idempotency", "overview", "quota", "request", "sale", "slot", "tier"];
    assert_eq!(names, expected);
    for (name, dashboard) in &dashboards {
        assert_eq!(dashboard["uid"], format!("weir-{name}"));
        let panels = panels(dashboard);
        assert!(panels.len() > 8, "{name}");
        for panel in panels {
            assert_eq!(panel["datasource"]["uid"], "prometheus", "{panel}");
            assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{panel}");
        }
    }
    let read = |path: &str| std::fs::read_to_string(directory().join(path)).unwrap();
    assert!(read("datasources.yml").contains("uid: prometheus"));
    assert!(read("dashboards.yml").contains("path: /var/lib/grafana/dashboards"));
    let grafana = service("grafana");
    assert!(grafana.volumes.contains(&"./grafana/dashboards:/var/lib/grafana/dashboards:ro".to_owned()));
    let home = &grafana.environment()["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"];
    assert_eq!(home, "/var/lib/grafana/dashboards/overview.json");
}

#[test]
fn every_alert_is_on_a_panel_that_leads_to_the_runbook() {
    let mut shown = BTreeSet::new();
    for (_, dashboard) in dashboards() {
        for panel in panels(&dashboard) {
            for link in panel["links"].as_array().into_iter().flatten() {
                let title = link["title"].as_str().unwrap().strip_prefix("Runbook: ").unwrap();
                shown.extend(title.split(", ").map(str::to_owned));
                assert_eq!(link["url"], "/public/weir/alerts.txt", "{title}");
            }
        }
    }
    let alerts = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    assert_eq!(shown, alerts.map(str::to_owned).collect());
    let served = "../docs/alerts.md:/usr/share/grafana/public/weir/alerts.txt:ro".to_owned();
    assert!(service("grafana").volumes.contains(&served), "Grafana serves what the panels link to");
}
