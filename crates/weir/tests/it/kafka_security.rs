//! Kafka over TLS and with credentials, against a real broker: every way of connecting works, and a wrong one says why it does
//! not.

use std::path::PathBuf;
use std::process::Command;

use futures_util::future::join_all;
use weir_testkit::certificates::Authority;
use weir_testkit::http::Client;
use weir_testkit::kafka::secure::{PASSWORD, SecureBroker, USER};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::{skip, wait};

use crate::fixtures::{TEST_TIMEOUT, configure, deliveries, message, weir_with_long_timeouts};

async fn broker() -> &'static SecureBroker {
    tokio::task::spawn_blocking(SecureBroker::shared).await.unwrap()
}

/// A server with a consumer group of its own.
fn server(broker: &str, group: &str) -> Builder {
    weir_with_long_timeouts().env("WEIR_BROKER", broker).env("WEIR_KAFKA_GROUP", group)
}

fn with_credentials(server: Builder, mechanism: &str, password: &str) -> Builder {
    server
        .env("WEIR_KAFKA_SASL_MECHANISM", mechanism)
        .env("WEIR_KAFKA_USERNAME", USER)
        .env("WEIR_KAFKA_PASSWORD", password)
}

fn trusting(server: Builder, ca: PathBuf) -> Builder {
    server.env("WEIR_KAFKA_CA", ca)
}

fn no_line_has_a_password(weir: &Weir, password: &str) {
    assert!(!weir.log_lines().iter().any(|line| line.contains(password)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_sent_and_delivered_over_tls_and_with_every_mechanism() {
    if skip("kafka") {
        return;
    }
    let broker = broker().await;
    let ca = || broker.file("ca.pem");
    let mut servers = vec![
        ("tls", trusting(server(&broker.tls(), "tls"), ca())),
        (
            "mutual",
            trusting(server(&broker.mutual_tls(), "mutual"), ca())
                .env("WEIR_KAFKA_CERT", broker.file("client.pem"))
                .env("WEIR_KAFKA_KEY", broker.file("client.key")),
        ),
        ("scram", with_credentials(server(&broker.sasl(), "scram"), "SCRAM-SHA-512", PASSWORD)),
    ];
    for mechanism in ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let server = trusting(server(&broker.sasl_over_tls(), mechanism), ca());
        servers.push((mechanism, with_credentials(server, mechanism, PASSWORD)));
    }
    let checks = servers.into_iter().map(async |(name, server)| {
        let weir = server.env("WEIR_LOG_LEVEL", "trace").spawn().await;
        let client = Client::new(weir.base_url());
        wait::until("the broker answers", TEST_TIMEOUT, async || {
            client.get("/readyz/quota").await.unwrap().status == 200
        })
        .await;
        configure(&client, name, 10, 60).await;
        let sent = client.post("/api/send", &message(name, "hello")).await.unwrap();
        assert_eq!(sent.status, 200, "{name}: {:?}", sent.body);
        let expected = (name.to_owned(), "hello".to_owned());
        wait::until("it is delivered", TEST_TIMEOUT, async || deliveries(&weir).contains(&expected)).await;
        no_line_has_a_password(&weir, PASSWORD);
    });
    join_all(checks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_and_certificates_are_named_by_the_log_and_readiness() {
    if skip("kafka") {
        return;
    }
    const WRONG: &str = "wrong-hunter3";
    let broker = broker().await;
    let ca = || broker.file("ca.pem");
    let (credentials, tls) =
        ("the brokers refuse the credentials", "no TLS connection to the brokers can be made");
    let over_tls = || trusting(server(&broker.sasl_over_tls(), "refused"), ca());
    let servers = [
        (with_credentials(over_tls(), "PLAIN", WRONG), credentials),
        (with_credentials(over_tls(), "SCRAM-SHA-256", WRONG), credentials),
        (with_credentials(over_tls(), "SCRAM-SHA-512", WRONG), credentials),
        (trusting(server(&broker.tls(), "refused"), broker.file("other-ca.pem")), tls),
        (server(&broker.tls(), "refused"), tls),
        (trusting(server(&broker.mutual_tls(), "refused"), ca()), tls),
        // The certificate is not for this name.
        (trusting(server(&broker.tls().replace("localhost", "127.0.0.1"), "refused"), ca()), tls),
    ];
    let checks = servers.into_iter().map(async |(server, expected)| {
        let weir = server.spawn().await;
        let line = weir.wait_for_log(|line| line.contains(expected), TEST_TIMEOUT).await;
        assert!(line.contains("ERROR"), "{line}");
        let client = Client::new(weir.base_url());
        let reason = format!("kafka: {expected}");
        wait::until("readiness says why", TEST_TIMEOUT, async || {
            let ready = client.get("/readyz/quota").await.unwrap();
            ready.status == 503 && ready.json()["reason"] == reason.as_str()
        })
        .await;
        configure(&client, "refused", 10, 60).await;
        assert_eq!(client.post("/api/send", &message("refused", "x")).await.unwrap().status, 503);
        no_line_has_a_password(&weir, WRONG);
    });
    join_all(checks).await;
}

#[test]
fn settings_of_kafka_that_cannot_be_used_stop_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::generate();
    let (one, other) = (authority.issue(&["one"]), authority.issue(&["other"]));
    let file = |name: &str, content: &str| {
        std::fs::write(directory.path().join(name), content).unwrap();
        directory.path().join(name).to_str().unwrap().to_owned()
    };
    let (cert, key) = (file("cert.pem", &one.certificate), file("key.pem", &one.key));
    let (other_key, nonsense) = (file("other.key", &other.key), file("nonsense.pem", "nonsense"));
    let (tls, plain) = (("WEIR_BROKER", "kafka+ssl://localhost"), ("WEIR_BROKER", "kafka://localhost"));
    let (cert, mechanism) = (("WEIR_KAFKA_CERT", &*cert), ("WEIR_KAFKA_SASL_MECHANISM", "PLAIN"));
    for (environment, part) in [
        (vec![plain, ("WEIR_KAFKA_SASL_MECHANISM", "GSSAPI")], "SCRAM-SHA-256"),
        (vec![plain, mechanism], "kafka.username and WEIR_KAFKA_PASSWORD are missing"),
        (vec![plain, cert, ("WEIR_KAFKA_KEY", &key)], "kafka+ssl://"),
        (vec![tls, cert], "kafka.key is not"),
        (vec![tls, ("WEIR_KAFKA_CA", &nonsense)], "WEIR_KAFKA_CA"),
        (vec![tls, cert, ("WEIR_KAFKA_KEY", &nonsense)], "WEIR_KAFKA_KEY"),
        (vec![tls, cert, ("WEIR_KAFKA_KEY", &other_key)], "kafka+ssl://localhost:9092"),
    ] {
        let mut command = Command::new("timeout");
        command.args(["60", env!("CARGO_BIN_EXE_weir"), "serve", "--listen", "127.0.0.1:0"]);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
            command.env_remove(name);
        }
        command.env("WEIR_GRPC_LISTEN", "127.0.0.1:0").envs(environment);
        let output = command.current_dir(directory.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part), "{errors} lacks {part}");
    }
}
