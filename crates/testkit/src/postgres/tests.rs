//! Tests of what other crates rely on, against real clusters.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::instance::READY_TIMEOUT;
use crate::wait::until;

async fn value(database: &Database, sql: &str) -> String {
    let mut rows = database.query_strings(sql).await;
    rows.remove(0).remove(0).expect("a value that is not NULL")
}

#[tokio::test]
async fn a_shared_server_gives_each_test_its_own_database() {
    if crate::skip("postgres") {
        return;
    }
    let one = Server::shared().database("one").await;
    let two = Server::shared().database("two").await;
    one.execute("CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'x'), (2, NULL)").await;
    let rows = one.query_strings("SELECT a, b FROM t ORDER BY a").await;
    let expected = [[Some("1"), Some("x")], [Some("2"), None]];
    assert_eq!(rows, expected.map(|row| row.map(|value| value.map(str::to_owned)).to_vec()));
    assert_eq!(value(&two, "SELECT count(*) FROM pg_tables WHERE tablename = 't'").await, "0");
    // A server from WEIR_TEST_POSTGRES has its own settings.
    if Server::shared().instance.is_some() {
        assert_eq!(value(&one, "SHOW fsync").await, "on");
        assert_eq!(value(&one, "SHOW max_connections").await, "300");
    }
}

#[test]
fn a_shared_server_can_be_reached_without_a_runtime() {
    if crate::skip("postgres") {
        return;
    }
    assert!(std::net::TcpStream::connect(Server::shared().addr()).is_ok());
}

#[tokio::test]
async fn a_wrong_password_is_refused() {
    if crate::skip("postgres") {
        return;
    }
    let database = Server::shared().database("password").await;
    let mut url = Url::parse(database.url()).unwrap();
    url.set_password(Some("wrong")).unwrap();
    let error = connection::open(&url, None).await.err().unwrap();
    assert_eq!(error.code().unwrap().code(), "28P01");
}

#[tokio::test]
async fn committed_rows_survive_a_crash_and_the_port_stays() {
    if crate::skip("postgres") {
        return;
    }
    let mut server = Server::private();
    let database = server.database("crash").await;
    let addr = server.addr();
    database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (7)").await;
    let session = database.connect().await.unwrap();

    server.crash();
    assert!(session.batch_execute("SELECT 1").await.is_err());
    assert!(database.connect().await.is_err());

    server.start().await;
    assert_eq!(server.addr(), addr);
    assert_eq!(value(&database, "SELECT a FROM t").await, "7");
    assert!(server.log().contains("database system was not properly shut down"), "{}", server.log());

    server.restart().await;
    assert_eq!(value(&database, "SELECT a FROM t").await, "7");
}

#[tokio::test]
async fn a_paused_server_answers_after_resume() {
    if crate::skip("postgres") {
        return;
    }
    let mut server = Server::private();
    let database = server.database("pause").await;
    let session = Arc::new(database.connect().await.unwrap());

    server.pause();
    let query = tokio::spawn({
        let session = Arc::clone(&session);
        async move { session.batch_execute("SELECT 1").await }
    });
    let silent = tokio::time::timeout(Duration::from_millis(200), database.connect()).await;
    assert!(silent.is_err(), "a paused server must not answer a new connection");
    assert!(!query.is_finished(), "a paused server must not answer an open connection");

    server.resume();
    query.await.unwrap().unwrap();
}

#[tokio::test]
async fn tls_is_verified_and_plaintext_is_refused() {
    if crate::skip("postgres") {
        return;
    }
    let server = Server::private_with_tls();
    let database = server.database("tls").await;
    let encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert_eq!(value(&database, encrypted).await, "t");

    let plaintext = Url::parse(&database.url().replace("sslmode=require", "sslmode=disable")).unwrap();
    let error = connection::open(&plaintext, None).await.err().unwrap();
    assert_eq!(error.code().unwrap().code(), "28000", "{}", connection::describe(&error));

    let other_name = Url::parse(&database.url().replace("localhost", "127.0.0.1")).unwrap();
    assert!(connection::open(&other_name, server.ca_file()).await.is_err());
}

#[tokio::test]
async fn options_replace_the_default_settings() {
    if crate::skip("postgres") {
        return;
    }
    let options =
        Options { settings: vec![("synchronous_commit".into(), "off".into())], ..Options::default() };
    let server = Server::with_options(&options);
    let database = server.database("options").await;
    assert_eq!(value(&database, "SHOW synchronous_commit").await, "off");
    assert_eq!(value(&database, "SHOW max_connections").await, "100");
    assert!(server.bin_dir().is_none_or(|bin_dir| bin_dir.join("postgres").exists()));
}

#[tokio::test]
async fn a_database_on_an_external_server_is_dropped_after_its_test() {
    if crate::skip("postgres") {
        return;
    }
    let ours = Server::shared();
    let external = Server::external(ours.url.as_str());
    let database = external.database("external").await;
    let name = Url::parse(database.url()).unwrap().path().trim_start_matches('/').to_owned();
    let sql = format!("SELECT count(*) FROM pg_database WHERE datname = '{name}'");
    let observer = ours.database("observer").await;
    assert_eq!(value(&observer, &sql).await, "1");
    drop(database);
    assert_eq!(value(&observer, &sql).await, "0");
}

/// Not a test: [`a_killed_test_process_leaves_nothing_behind`] runs it in a process that it kills.
#[test]
#[ignore = "run as a child process by another test"]
fn hold_a_server_until_killed() {
    let Ok(file) = std::env::var("WEIR_TESTKIT_ADDRESS_FILE") else {
        return;
    };
    let server = Server::private();
    std::fs::write(file, format!("{}\n", server.addr())).unwrap();
    // In a loop, since parking may end spuriously, which would drop the server.
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn a_killed_test_process_leaves_nothing_behind() {
    if crate::skip("postgres") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Accessible to the user that PostgreSQL runs as, so that the child's files are created in here.
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let address_file = directory.path().join("address");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "postgres::tests::hold_a_server_until_killed"])
        .env("WEIR_TESTKIT_ADDRESS_FILE", &address_file)
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let read = || std::fs::read_to_string(&address_file).unwrap_or_default();
    until("the child's server", READY_TIMEOUT, async || read().ends_with('\n')).await;
    let addr = read().trim().to_owned();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    assert!(files() > 1 || find::local().is_none(), "the child's cluster should be in {directory:?}");
    tokio::net::TcpStream::connect(&addr).await.unwrap();

    child.kill().unwrap();
    child.wait().unwrap();
    until("the orphaned server to end", READY_TIMEOUT, async || {
        tokio::net::TcpStream::connect(&addr).await.is_err()
    })
    .await;
    until("its files to go", READY_TIMEOUT, async || files() == 1).await;
}
