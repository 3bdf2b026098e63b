//! Checks the files in `deploy/`: their settings exist and are accepted, services have health checks and wait only for services
//! that exist, volumes are declared, versions agree.
//!
//! No container is started, and the files are read line by line: the compose file is simple enough, and a YAML parser would be
//! one more dependency.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use weir_server::settings::Settings;
use weir_server::settings::log::LogFormat;
use weir_server::settings::source::{Sources, flatten_toml};
use weir_server::settings::store::{BrokerChoice, CacheChoice, EngineChoice};

const COMPOSE: &str = include_str!("../../../../deploy/docker-compose.yml");
const DOCKERFILE: &str = include_str!("../../../../deploy/Dockerfile");
const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");
const ALERT_TESTS: &str = include_str!("../../../../deploy/prometheus/alerts_test.yml");
const ENV_EXAMPLE: &str = include_str!("../../../../deploy/.env.example");
const README: &str = include_str!("../../../../deploy/README.md");

/// Returns the lines below the key at the end of `path`, without common indentation and comments.
fn below(path: &[&str]) -> Option<Vec<String>> {
    let mut lines: Vec<String> = COMPOSE
        .lines()
        .filter(|line| !line.trim_start().is_empty() && !line.trim_start().starts_with('#'))
        .map(str::to_owned)
        .collect();
    for key in path {
        let is_key = |line: &String| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':'));
        let start = lines.iter().position(is_key)?;
        let inner = lines[start + 1..].iter().take_while(|line| line.starts_with(' '));
        let indent = inner.clone().next().map_or(0, |line| line.len() - line.trim_start().len());
        lines = inner.map(|line| line[indent..].to_owned()).collect();
    }
    Some(lines)
}

/// Returns the keys directly below `path`.
fn keys(path: &[&str]) -> BTreeSet<String> {
    let lines = below(path).unwrap_or_default();
    let keys = lines.iter().filter(|line| !line.starts_with([' ', '-']));
    keys.filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
}

/// Returns a service's environment with all defaults.
fn environment(service: &str) -> BTreeMap<String, String> {
    let lines = below(&["services", service, "environment"]).unwrap_or_default();
    let pairs = lines.iter().filter_map(|line| line.split_once(": "));
    pairs.map(|(name, value)| (name.to_owned(), with_defaults(value.trim_matches('"')))).collect()
}

/// Replaces each `${NAME:-default}` by its default, the innermost first, because they may be nested.
fn with_defaults(text: &str) -> String {
    let mut text = text.to_owned();
    while let Some(start) = text.rfind("${") {
        let end = start + text[start..].find('}').expect("a } for each ${");
        let (_, default) = text[start..end].split_once(":-").expect("a default for each variable");
        text = format!("{}{default}{}", &text[..start], &text[end + 1..]);
    }
    text
}

/// Returns the names of the variables in the compose file.
fn compose_variables() -> BTreeSet<&'static str> {
    let names = COMPOSE.lines().filter(|line| !line.trim_start().starts_with('#'));
    let names = names.flat_map(|line| line.split("${").skip(1));
    names.filter_map(|rest| Some(rest.split_once(":-")?.0)).collect()
}

/// Returns the variables that the image sets.
fn image_environment() -> BTreeMap<String, String> {
    let words = DOCKERFILE.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace);
    let pairs = words.filter_map(|word| word.split_once('='));
    pairs
        .filter(|(name, _)| name.starts_with("WEIR_"))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Returns the settings of a service: its own variables, then those of the image.
fn settings(service: &str) -> Settings {
    let mut variables = image_environment();
    variables.extend(environment(service));
    variables.retain(|name, _| name.starts_with("WEIR_"));
    let sources = Sources { environment: variables, ..Sources::default() };
    Settings::read(sources).unwrap_or_else(|error| panic!("{service}: {error}"))
}

/// Returns the services that run Weir.
fn weir_services() -> Vec<String> {
    let all = keys(&["services"]).into_iter();
    all.filter(|service| keys(&["services", service]).contains("build")).collect()
}

#[test]
fn every_variable_of_the_deployment_is_known_and_accepted() {
    assert_eq!(weir_services(), ["gateway", "sender", "worker"]);
    for service in weir_services() {
        assert_eq!(settings(&service).unknown_variables, [""; 0], "{service}");
    }
}

#[test]
fn the_image_starts_and_requires_credentials_unless_anonymous_callers_are_allowed() {
    let read = |anonymous: Option<&str>| {
        let mut environment = image_environment();
        environment.extend(anonymous.map(|value| ("WEIR_ALLOW_ANONYMOUS".to_owned(), value.to_owned())));
        Settings::read(Sources { environment, ..Sources::default() }).unwrap()
    };
    let image = read(None);
    assert!(!image.auth.allow_anonymous && !image.auth.allow_anonymous_grpc);
    assert_eq!(image.unknown_variables, [""; 0]);
    assert_eq!(image.process.data.to_str(), Some("/data"));
    assert!(read(Some("true")).auth.allow_anonymous);
}

#[test]
fn the_stack_requires_credentials() {
    for service in weir_services() {
        let auth = settings(&service).auth;
        assert!(!auth.allow_anonymous && !auth.allow_anonymous_grpc, "{service}");
    }
}

#[test]
fn the_image_has_this_version_and_a_sufficient_compiler() {
    let argument = |name: &str| {
        let prefix = format!("ARG {name}=");
        DOCKERFILE.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap().to_owned()
    };
    assert_eq!(argument("VERSION"), env!("CARGO_PKG_VERSION"));
    let version = |text: &str| text.split('.').map(|part| part.parse::<u32>().unwrap()).collect::<Vec<_>>();
    assert!(version(&argument("RUST_VERSION")) >= version(env!("CARGO_PKG_RUST_VERSION")));
}

#[test]
fn gateway_sender_and_worker_share_engines_and_secrets_and_split_the_roles() {
    let (gateway, sender, worker) = (settings("gateway"), settings("sender"), settings("worker"));
    assert!(worker.process.roles.worker && worker.process.roles.reconciler && !worker.process.roles.api);
    assert_eq!(gateway.store, worker.store);
    assert_eq!(gateway.auth.admin_key, worker.auth.admin_key);
    assert!(gateway.process.roles.api && !gateway.process.roles.sender);
    assert!(sender.process.roles.sender && !sender.process.roles.api);
    assert!(matches!(gateway.store.engine, EngineChoice::Postgres(_)));
    assert!(matches!(gateway.store.cache, CacheChoice::Redis(_)));
    assert!(matches!(gateway.store.broker, BrokerChoice::Kafka(_)));
    assert_eq!(gateway.store.engine, sender.store.engine);
    assert_eq!(gateway.store.broker, sender.store.broker);
    assert!(gateway.auth.admin_key.is_some() && gateway.auth.jwt_secret.is_some());
    assert_eq!(
        (gateway.auth.admin_key, gateway.auth.jwt_secret),
        (sender.auth.admin_key, sender.auth.jwt_secret)
    );
    assert_eq!((gateway.log.format, sender.log.format), (LogFormat::Json, LogFormat::Json));
}

#[test]
fn every_service_has_a_health_check_restarts_a_memory_limit_and_healthy_dependencies() {
    let services = keys(&["services"]);
    assert_eq!(
        services.iter().map(String::as_str).collect::<Vec<_>>(),
        ["gateway", "kafka", "postgres", "redis", "sender", "worker"]
    );
    for service in &services {
        assert!(
            keys(&["services", service, "healthcheck"]).contains("test"),
            "{service} has no health check"
        );
        let properties = keys(&["services", service]);
        assert!(
            properties.contains("restart") && properties.contains("mem_limit"),
            "{service}: {properties:?}"
        );
        for other in keys(&["services", service, "depends_on"]) {
            assert!(services.contains(&other), "{service} waits for {other}, which does not exist");
            let condition = below(&["services", service, "depends_on", &other]).unwrap();
            assert_eq!(condition, ["condition: service_healthy"], "{service} waits for {other}");
        }
    }
    for weir in weir_services() {
        let dependencies = keys(&["services", &weir, "depends_on"]);
        assert!(
            dependencies.contains("postgres") && dependencies.contains("kafka"),
            "{weir} waits for {dependencies:?}"
        );
    }
}

#[test]
fn every_volume_is_declared_and_used_and_postgres_has_one() {
    let used = |service: &str| {
        let lines = below(&["services", service, "volumes"]).unwrap_or_default();
        let names =
            lines.iter().filter_map(|line| Some(line.strip_prefix("- ")?.split_once(':')?.0.to_owned()));
        names.collect::<BTreeSet<_>>()
    };
    let services = keys(&["services"]);
    let all: BTreeSet<_> = services.iter().flat_map(|service| used(service)).collect();
    assert_eq!(all, keys(&["volumes"]));
    assert!(!used("postgres").is_empty() && !used("kafka").is_empty());
}

#[test]
fn the_stack_publishes_ports_only_on_loopback() {
    for service in keys(&["services"]) {
        for port in below(&["services", &service, "ports"]).unwrap_or_default() {
            assert!(port.starts_with("- 127.0.0.1:"), "{service} publishes {port}");
        }
    }
}

#[test]
fn the_example_environment_lists_every_variable_with_its_default() {
    let lines = ENV_EXAMPLE.lines().filter_map(|line| line.trim_start_matches("# ").split_once('='));
    let listed: BTreeMap<_, _> = lines.filter(|(name, _)| !name.contains([' ', ':', '/'])).collect();
    assert_eq!(listed.keys().copied().collect::<BTreeSet<_>>(), compose_variables());
    for (name, value) in
        ENV_EXAMPLE.lines().filter(|line| !line.starts_with('#')).filter_map(|l| l.split_once('='))
    {
        assert!(
            COMPOSE.contains(&format!("${{{name}:-{value}}}")),
            "{name} is not {value} in the compose file"
        );
    }
}

#[test]
fn the_readme_names_only_known_variables() {
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    // Includes variables without a value, which compose passes on if they are set.
    let known: BTreeSet<_> =
        weir_services().iter().flat_map(|weir| keys(&["services", weir, "environment"])).collect();
    let image = image_environment();
    for name in README.split(|c| !is_name(c)).filter(|word| word.starts_with("WEIR_")) {
        assert!(known.contains(name) || image.contains_key(name), "{name}");
    }
}

#[test]
fn alerts_fire_on_the_faults_that_they_are_about_and_only_then() {
    if weir_testkit::skip("prometheus") {
        return;
    }
    let promtool = weir_testkit::promtool().unwrap_or_else(|why| {
        panic!("cannot find promtool: {why}. Install Debian's package prometheus, or set WEIR_TEST_SKIP=prometheus")
    });
    for (command, file) in [("check", "alerts.yml"), ("test", "alerts_test.yml")] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus").join(file);
        let output =
            std::process::Command::new(&promtool).args([command, "rules"]).arg(path).output().unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{file}: {stdout}{stderr}");
    }
}

#[test]
fn every_alert_is_tested_to_fire_and_to_stay_silent() {
    let alerts = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    for alert in alerts {
        let tests = ALERT_TESTS.split("      - expr: ").skip(1);
        let name = format!("alertname=\"{alert}\"");
        let of_alert: Vec<_> = tests.filter(|test| test.contains(&name)).collect();
        let is_silent = |test: &&&str| test.contains("exp_samples: []");
        assert!(of_alert.iter().any(|test| !is_silent(&test)), "no test in which {alert} fires");
        assert!(of_alert.iter().any(|test| is_silent(&test)), "no test in which {alert} stays silent");
    }
}

#[test]
fn the_policies_of_the_envoy_example_match_its_descriptors() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/envoy");
    let path = directory.join("weir.toml");
    let values = flatten_toml(&path, &std::fs::read_to_string(&path).unwrap()).unwrap();
    let settings = Settings::read(Sources { file: Some((path, values)), ..Sources::default() }).unwrap();
    let envoy = std::fs::read_to_string(directory.join("envoy.yaml")).unwrap();
    let descriptors: [&[(&str, &str)]; 2] =
        [&[("remote_address", "10.0.0.1")], &[("path", "/login"), ("remote_address", "10.0.0.1")]];
    assert_eq!(settings.tier.policies.len(), descriptors.len());
    for entries in descriptors {
        let policies = settings.tier.policies.values().filter_map(|spec| spec.matches.as_ref());
        assert_eq!(
            policies.filter(|matches| matches.key("edge", entries).is_some()).count(),
            1,
            "{entries:?}"
        );
    }
    for part in ["domain: edge", "descriptor_key: path, descriptor_value: /login", "remote_address: {}"] {
        assert!(envoy.contains(part), "{part}");
    }
    let port = settings.process.grpc_listen.port();
    assert!(envoy.contains(&format!("port_value: {port}")), "the default address of gRPC");
}
