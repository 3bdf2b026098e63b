//! Checks that the settings in `deploy/kubernetes` are accepted in every role, and that its figures are those of the settings.
//! `make kubernetes` checks the manifests themselves.

use std::path::{Path, PathBuf};

use weir_server::settings::Settings;
use weir_server::settings::log::LogFormat;
use weir_server::settings::source::{Sources, flatten_toml};
use weir_server::settings::store::EngineChoice;
use weir_testkit::stack::compose;

use crate::dashboards::assert_queries_can_be_asked;
use crate::deploy::image_environment;

const ROLES: [&str; 4] = ["api", "worker", "sender", "reconciler"];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(directory().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the settings of a role: the secret's variables and its own, then those of the image, then the file.
fn settings(role: &str) -> Settings {
    let mut environment = image_environment();
    environment.extend(compose::environment_file(&directory().join("secret.env.example")));
    environment.insert("WEIR_ROLES".to_owned(), role.to_owned());
    environment.retain(|name, _| name.starts_with("WEIR_"));
    let path = directory().join("base/weir.toml");
    let values = flatten_toml(&path, &read("base/weir.toml")).unwrap();
    let sources = Sources { environment, file: Some((path, values)), ..Sources::default() };
    Settings::read(sources).unwrap_or_else(|error| panic!("{role}: {error}"))
}

#[test]
fn the_settings_for_kubernetes_are_accepted_in_every_role_and_require_credentials() {
    for role in ROLES {
        let kustomization = read(&format!("base/{role}/kustomization.yaml"));
        assert!(kustomization.contains(&format!("{{name: WEIR_ROLES, value: {role}}}")), "{role}");
        let settings = settings(role);
        assert_eq!(settings.unknown_variables, [""; 0], "{role}");
        let roles = &settings.process.roles;
        assert_eq!([roles.api, roles.worker, roles.sender, roles.reconciler], ROLES.map(|name| name == role));
        assert!(!settings.auth.allow_anonymous && !settings.auth.allow_anonymous_grpc, "{role}");
        assert!(settings.auth.admin_key.is_some() && settings.auth.jwt_secret.is_some(), "{role}");
        assert!(settings.request.keys.is_some() && settings.request.webhook_secret.is_some(), "{role}");
        assert!(matches!(settings.store.engine, EngineChoice::Postgres(_)), "{role}");
        assert_eq!(settings.log.format, LogFormat::Json, "{role}");
    }
}

#[test]
fn the_figures_of_the_manifests_are_those_of_the_settings_and_of_this_version() {
    let version = format!("newTag: {}\n", env!("CARGO_PKG_VERSION"));
    assert!(read("base/kustomization.yaml").contains(&version), "{version}");
    let autoscaling = read("overlays/production/autoscaling.yaml");
    let backlog = format!("averageValue: \"{}\"", settings("worker").request.concurrency);
    assert!(autoscaling.contains(&backlog), "a worker calls as many as the autoscaler takes for no backlog");
    let partitions = format!("(kafka.partitions, {})", settings("sender").store.kafka_partitions);
    assert!(autoscaling.contains(&partitions), "{partitions}");
}

#[test]
fn prometheus_can_read_the_query_behind_the_autoscaler_and_its_metric_exists() {
    let adapter = read("prometheus-adapter.yaml");
    let query = adapter.lines().find_map(|line| line.trim().strip_prefix("metricsQuery: '")).unwrap();
    let query = query.strip_suffix('\'').unwrap().replace("<<.LabelMatchers>>", "namespace=\"weir\"");
    assert!(query.contains("weir_request_jobs{namespace=\"weir\", state=\"waiting\"}"), "{query}");
    assert_queries_can_be_asked(&[("prometheus-adapter.yaml".to_owned(), query)]);
}
