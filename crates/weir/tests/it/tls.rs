//! TLS to Postgres: connections are encrypted if requested, and only made to a server with a trusted certificate.

use std::process::Command;

use weir_testkit::http::Client;
use weir_testkit::postgres::Server;

use crate::fixtures::{configure, weir};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sslmode_decides_how_the_servers_certificate_is_checked() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Server::private_with_tls();
    let database = server.database("tls").await;
    let ca = server.ca_file().expect("a CA").to_str().expect("a plain path").replace('/', "%2F");
    let base = database.url().split('?').next().expect("an address").to_owned();
    for accepted in [
        format!("{base}?sslmode=require"),
        format!("{base}?sslmode=verify-ca&sslrootcert={ca}"),
        format!("{base}?sslmode=verify-full&sslrootcert={ca}"),
    ] {
        let weir = weir().env("WEIR_STORE", &accepted).spawn().await;
        configure(&Client::new(weir.base_url()), "u", 1, 1).await;
        let encrypted = database.query_strings("SELECT bool_and(ssl)::text FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'weir'").await;
        assert_eq!(encrypted, [[Some("true".to_owned())]]);
    }
    // The certificate names localhost, not the address 127.0.0.1, and the system does not trust the test's CA.
    let by_address = base.replace("@localhost", "@127.0.0.1");
    for refused in [
        format!("{by_address}?sslmode=verify-full&sslrootcert={ca}"),
        format!("{base}?sslmode=verify-full"),
        format!("{base}?sslmode=disable"),
    ] {
        expect_refused_start(&refused);
    }
    let _lenient =
        weir().env("WEIR_STORE", format!("{by_address}?sslmode=verify-ca&sslrootcert={ca}")).spawn().await;
}

fn expect_refused_start(store: &str) {
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(data.path()).env("WEIR_STORE", store);
    command.env("WEIR_GRPC_LISTEN", "127.0.0.1:0");
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot open the store"), "{stderr}");
}
