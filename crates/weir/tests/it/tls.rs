//! TLS to Postgres: encrypted when asked for, and to nobody but the one we trust.

use std::process::Command;

use weir_testkit::http::Client;
use weir_testkit::postgres::Server;

use crate::fixtures::{configure, weir};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_certificate_is_checked_as_sslmode_says() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Server::private_with_tls();
    let database = server.database("tls").await;
    let ca = server.ca_file().expect("a CA").to_str().expect("a plain path").replace('/', "%2F");
    let base = database.url().split('?').next().expect("an address").to_owned();
    for good in [
        format!("{base}?sslmode=require"),
        format!("{base}?sslmode=verify-ca&sslrootcert={ca}"),
        format!("{base}?sslmode=verify-full&sslrootcert={ca}"),
    ] {
        let weir = weir().env("WEIR_STORE", &good).spawn().await;
        configure(&Client::new(weir.base_url()), "u", 1, 1).await;
        let encrypted = database.query_strings("SELECT bool_and(ssl)::text FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'weir'").await;
        assert_eq!(encrypted, [[Some("true".to_owned())]]);
    }
    // The certificate names localhost; by its number it is somebody else. And the system trusts no CA of ours.
    let by_number = base.replace("@localhost", "@127.0.0.1");
    for bad in [
        format!("{by_number}?sslmode=verify-full&sslrootcert={ca}"),
        format!("{base}?sslmode=verify-full"),
        format!("{base}?sslmode=disable"),
    ] {
        refuse_to_start(&bad);
    }
    let _lenient =
        weir().env("WEIR_STORE", format!("{by_number}?sslmode=verify-ca&sslrootcert={ca}")).spawn().await;
}

fn refuse_to_start(store: &str) {
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(data.path()).env("WEIR_STORE", store);
    command.env("WEIR_GRPC_LISTEN", "127.0.0.1:0");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot open the store"), "{said}");
}
