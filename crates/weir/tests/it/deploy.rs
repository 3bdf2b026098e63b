//! Checks the files in `deploy/`: their settings exist and are accepted, services have health checks and wait only for services
//! that exist, volumes are declared, versions agree. `stack.rs` starts what the compose file describes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

use weir_server::settings::Settings;
use weir_server::settings::log::LogFormat;
use weir_server::settings::source::{Sources, flatten_toml};
use weir_server::settings::store::{BrokerChoice, CacheChoice, EngineChoice};
use weir_testkit::stack::compose::{self, Compose, Service};

const COMPOSE_TEXT: &str = include_str!("../../../../deploy/docker-compose.yml");
const DOCKERFILE: &str = include_str!("../../../../deploy/Dockerfile");
const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");
const ALERT_TESTS: &str = include_str!("../../../../deploy/prometheus/alerts_test.yml");
const ENV_EXAMPLE: &str = include_str!("../../../../deploy/.env.example");
const README: &str = include_str!("../../../../deploy/README.md");
const UNIT: &str = include_str!("../../../../deploy/systemd/weir.service");
const UNIT_VARIABLES: &str = include_str!("../../../../deploy/systemd/weir.env");
const MANIFEST: &str = include_str!("../../Cargo.toml");

/// `compose.yaml` with what it includes and with all defaults.
static COMPOSE: LazyLock<Compose> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Compose::read(&root, &|_| None).unwrap_or_else(|error| panic!("{error}"))
});

pub(crate) fn service(name: &str) -> &'static Service {
    COMPOSE.services.get(name).unwrap_or_else(|| panic!("no service {name}"))
}

/// Returns the names of the variables in the compose file.
fn compose_variables() -> BTreeSet<&'static str> {
    let names = COMPOSE_TEXT.lines().filter(|line| !line.trim_start().starts_with('#'));
    let names = names.flat_map(|line| line.split("${").skip(1));
    names.filter_map(|rest| Some(rest.split_once(":-")?.0)).collect()
}

pub(crate) fn image_environment() -> BTreeMap<String, String> {
    compose::image_environment(DOCKERFILE)
}

/// Returns the settings of a service: its own variables, then those of the image.
fn settings(name: &str) -> Settings {
    let mut variables = image_environment();
    variables.extend(service(name).environment());
    variables.retain(|name, _| name.starts_with("WEIR_"));
    let sources = Sources { environment: variables, ..Sources::default() };
    Settings::read(sources).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the services that run Weir.
fn weir_services() -> Vec<&'static str> {
    let all = COMPOSE.services.iter();
    all.filter(|(_, service)| service.build.is_some()).map(|(name, _)| name.as_str()).collect()
}

#[test]
fn every_variable_of_the_deployment_is_known_and_accepted() {
    assert_eq!(weir_services(), ["gateway", "sender", "worker"]);
    for service in weir_services() {
        assert_eq!(settings(service).unknown_variables, [""; 0], "{service}");
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
        let auth = settings(service).auth;
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
    let names: Vec<&str> = COMPOSE.services.keys().map(String::as_str).collect();
    let expected = [
        "gateway",
        "grafana",
        "kafka",
        "nginx",
        "ports",
        "postgres",
        "prometheus",
        "redis",
        "sender",
        "worker",
    ];
    assert_eq!(names, expected);
    for (name, service) in &COMPOSE.services {
        let check = service.healthcheck.as_ref().unwrap_or_else(|| panic!("{name} has no health check"));
        assert!(matches!(check.test[0].as_str(), "CMD" | "CMD-SHELL"), "{name}");
        assert!(service.restart.is_some() && service.mem_limit.is_some(), "{name}");
        for (other, dependency) in &service.depends_on {
            assert!(names.contains(&other.as_str()), "{name} waits for {other}, which does not exist");
            assert_eq!(dependency.condition, "service_healthy", "{name} waits for {other}");
        }
    }
    for weir in weir_services() {
        let dependencies = &service(weir).depends_on;
        assert!(dependencies.contains_key("postgres") && dependencies.contains_key("kafka"), "{weir}");
    }
}

#[test]
fn every_volume_is_declared_and_used_and_every_mounted_file_exists() {
    let (mut used, mut files) = (BTreeSet::new(), 0);
    for (name, service) in &COMPOSE.services {
        for volume in &service.volumes {
            let (source, _) = volume.split_once(':').unwrap();
            if source.starts_with('.') {
                files += 1;
                assert!(COMPOSE.directory.join(source).exists(), "{name} mounts {source}");
                assert!(volume.ends_with(":ro"), "{name} may change {source}");
            } else {
                used.insert(source);
            }
        }
    }
    assert_eq!(used, COMPOSE.volumes.keys().map(String::as_str).collect());
    assert!(files > 5 && used.contains("postgres-data") && used.contains("kafka-data"));
}

#[test]
fn the_stack_publishes_ports_only_on_loopback_and_those_of_engines_only_with_a_profile() {
    let mut published = BTreeSet::new();
    for (name, service) in &COMPOSE.services {
        for port in &service.ports {
            let rest = port.strip_prefix("127.0.0.1:").unwrap_or_else(|| panic!("{name} publishes {port}"));
            assert!(published.insert(rest.split_once(':').unwrap().0), "two services have the port {port}");
            assert!(!["postgres", "redis", "kafka"].contains(&name.as_str()), "{name} publishes {port}");
        }
        assert_eq!(service.profiles.is_empty(), name != "ports");
    }
    let local = service("kafka").environment()["KAFKA_ADVERTISED_LISTENERS"].clone();
    assert!(local.contains("LOCAL://127.0.0.1:9094"), "clients on this machine are told {local}");
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
            COMPOSE_TEXT.contains(&format!("${{{name}:-{value}}}")),
            "{name} is not {value} in the compose file"
        );
    }
}

#[test]
fn the_readme_names_only_known_variables() {
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    // Includes variables without a value, which compose passes on if they are set.
    let known: BTreeSet<_> = weir_services().into_iter().flat_map(|weir| service(weir).variables()).collect();
    let image = image_environment();
    for name in README.split(|c| !is_name(c)).filter(|word| word.starts_with("WEIR_")) {
        assert!(known.contains(name) || image.contains_key(name), "{name}");
    }
}

fn is_known_to_the_stack(name: &str) -> bool {
    weir_services().into_iter().any(|weir| service(weir).variables().any(|known| known == name))
}

#[test]
fn the_service_of_the_package_starts_what_the_package_installs_and_is_confined() {
    for (installed, line) in [
        ("\"usr/bin/weir\", \"755\"", "ExecStart=/usr/bin/weir serve --config /etc/weir/weir.toml"),
        ("\"etc/weir/weir.toml\", \"644\"", "ExecStart=/usr/bin/weir serve --config /etc/weir/weir.toml"),
        // Read by systemd as root.
        ("\"etc/weir/weir.env\", \"640\"", "EnvironmentFile=-/etc/weir/weir.env"),
    ] {
        assert!(MANIFEST.contains(installed), "{installed}");
        assert!(UNIT.lines().any(|unit| unit == line), "{line}");
    }
    for line in [
        "DynamicUser=yes",
        "StateDirectory=weir",
        "Environment=WEIR_DATA=/var/lib/weir",
        "CapabilityBoundingSet=",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "MemoryDenyWriteExecute=yes",
        "SystemCallFilter=@system-service",
        "RestartPreventExitStatus=2",
    ] {
        assert!(UNIT.lines().any(|unit| unit == line), "{line}");
    }
    let names = UNIT_VARIABLES.lines().filter_map(|line| Some(line.strip_prefix("# ")?.split_once('=')?.0));
    let names: Vec<&str> = names.filter(|name| name.starts_with("WEIR_")).collect();
    assert!(names.contains(&"WEIR_ADMIN_KEY"), "{names:?}");
    for name in names {
        assert!(is_known_to_the_stack(name), "{name}");
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
fn the_documented_thresholds_and_the_alerts_are_the_same() {
    let document = include_str!("../../../../docs/alerts.md");
    let rows =
        document.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.split('|').nth(2));
    let documented: BTreeSet<&str> =
        rows.flat_map(|cell| cell.split('`')).filter(|word| word.starts_with("Weir")).collect();
    let alerts: BTreeSet<&str> =
        ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(documented, alerts);
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
        let policies = settings.tier.policies.values().filter_map(|policy| policy.matches());
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
