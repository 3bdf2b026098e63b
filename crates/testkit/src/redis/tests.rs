//! Tests of what other crates rely on, against real servers.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::instance::READY_TIMEOUT;
use crate::wait::until;

#[tokio::test]
async fn a_shared_server_answers_every_kind_of_command() {
    if crate::skip("redis") {
        return;
    }
    let server = Server::shared();
    let key = format!("testkit:{:016x}", fastrand::u64(..));
    assert_eq!(server.command(&["HSET", &key, "a", "1", "b", "zwei\r\nä"]).await.integer(), 2);
    assert_eq!(server.command(&["HGETALL", &key]).await.texts(), ["a", "1", "b", "zwei\r\nä"]);
    assert_eq!(server.command(&["PEXPIRE", &key, "60000"]).await, Reply::Integer(1));
    assert!((1..=60_000).contains(&server.command(&["PTTL", &key]).await.integer()));
    assert_eq!(server.command(&["DEL", &key]).await.text(), "1");
    assert_eq!(server.command(&["GET", &key]).await, Reply::Nil);
    let refusal = server.try_command(&["HSET", &key]).await.unwrap_err();
    assert!(refusal.starts_with("ERR wrong number of arguments"), "{refusal}");
}

#[test]
fn a_shared_server_can_be_reached_without_a_runtime() {
    if crate::skip("redis") {
        return;
    }
    assert!(std::net::TcpStream::connect(Server::shared().address()).is_ok());
    assert!(Server::shared().url().starts_with("redis://"), "{}", Server::shared().url());
    Server::external(Server::shared().url());
}

#[tokio::test]
async fn acknowledged_writes_survive_a_crash_and_the_port_stays() {
    if crate::skip("redis") {
        return;
    }
    let mut server = Server::private(&Options::default());
    let address = server.address();
    server.command(&["SET", "k", "7"]).await;
    server.crash();
    assert!(server.try_command(&["PING"]).await.is_err());

    server.start().await;
    assert_eq!(server.address(), address);
    assert_eq!(server.command(&["GET", "k"]).await.text(), "7");
    server.restart().await;
    assert_eq!(server.command(&["GET", "k"]).await.text(), "7");
    server.restart_empty().await;
    assert_eq!(server.command(&["DBSIZE"]).await.integer(), 0);

    server.command(&["SET", "k", "7"]).await;
    server.crash();
    server.start_empty().await;
    assert_eq!(server.command(&["DBSIZE"]).await.integer(), 0);
    let starts = server.log().matches("Ready to accept connections").count();
    assert_eq!(starts, 5, "{}", server.log());
}

#[tokio::test]
async fn a_server_without_appendonly_restarts_empty_and_has_its_settings() {
    if crate::skip("redis") {
        return;
    }
    let settings = vec![("maxmemory".to_owned(), "64mb".to_owned())];
    let mut server = Server::private(&Options { appendonly: false, settings, ..Options::default() });
    assert_eq!(server.command(&["CONFIG", "GET", "maxmemory"]).await.texts(), ["maxmemory", "67108864"]);
    server.command(&["SET", "k", "7"]).await;
    server.stop().await;
    server.start().await;
    assert_eq!(server.command(&["GET", "k"]).await, Reply::Nil);
}

#[tokio::test]
async fn a_paused_server_answers_after_resume() {
    if crate::skip("redis") {
        return;
    }
    let mut server = Server::private(&Options::default());
    server.pause();
    let silent = tokio::time::timeout(Duration::from_millis(200), server.try_command(&["PING"])).await;
    assert!(silent.is_err(), "a paused server must not answer");
    server.resume();
    assert_eq!(server.command(&["PING"]).await.text(), "PONG");
    server.pause();
    server.restart().await;
}

#[tokio::test]
async fn tls_is_verified_plaintext_is_refused_and_so_is_a_wrong_password() {
    if crate::skip("redis") {
        return;
    }
    let password = Some(r#"p%@/ "q\"#.to_owned());
    let server = Server::private(&Options { password, tls: true, ..Options::default() });
    assert_eq!(server.command(&["PING"]).await.text(), "PONG");
    let url = Url::parse(server.url()).unwrap();
    assert_eq!((url.scheme(), url.host_str()), ("rediss", Some("localhost")));

    let mut by_url = Endpoint::from_url(&url);
    by_url.ca_file = server.ca_file().map(Path::to_owned);
    // `localhost` may resolve to ::1 first, where the server does not listen.
    by_url.addr = server.address();
    by_url.probe().unwrap();
    by_url.password = Some("wrong".to_owned());
    assert!(by_url.probe().unwrap_err().starts_with("WRONGPASS"));
    by_url.password = None;
    assert!(by_url.probe().unwrap_err().starts_with("NOAUTH"));
    by_url.ca_file = None;
    let plaintext = by_url.probe().unwrap_err();
    assert!(!plaintext.starts_with("NOAUTH"), "{plaintext}");
    assert!(server.url_via(([127, 0, 0, 1], 7).into()).ends_with("@localhost:7"));
}

#[tokio::test]
async fn a_cluster_redirects_clients_when_a_slot_moves_or_has_moved() {
    if crate::skip("redis") {
        return;
    }
    let mut cluster = Cluster::private();
    let addresses: Vec<_> = cluster.nodes().iter().map(|node| node.address().to_string()).collect();
    assert_eq!(cluster.url(), format!("redis+cluster://{}", addresses.join(",")));

    let slot = cluster.slot_of("{k}1").await;
    let from = cluster.owner_of(slot).await;
    let to = (from + 1) % 3;
    cluster.nodes()[from].command(&["SET", "{k}1", "7"]).await;
    let moved = format!("MOVED {slot} {}", addresses[from]);
    assert_eq!(cluster.nodes()[to].try_command(&["GET", "{k}1"]).await, Err(moved));

    cluster.begin_slot_move(slot, to).await;
    assert_eq!(cluster.nodes()[from].command(&["GET", "{k}1"]).await.text(), "7");
    let ask = format!("ASK {slot} {}", addresses[to]);
    assert_eq!(cluster.nodes()[from].try_command(&["GET", "{k}2"]).await, Err(ask));

    cluster.finish_slot_move(slot, to).await;
    assert_eq!(cluster.owner_of(slot).await, to);
    assert_eq!(cluster.nodes()[to].command(&["GET", "{k}1"]).await.text(), "7");
    let moved = format!("MOVED {slot} {}", addresses[to]);
    assert_eq!(cluster.nodes()[from].try_command(&["GET", "{k}1"]).await, Err(moved));

    cluster.nodes_mut()[to].crash();
    cluster.nodes_mut()[to].start().await;
    cluster.wait_until_ok().await;
    assert_eq!(cluster.nodes()[to].command(&["GET", "{k}1"]).await.text(), "7");
}

/// Not a test: [`a_killed_test_process_leaves_nothing_behind`] runs it in a process that it kills.
#[test]
#[ignore = "run as a child process by another test"]
fn hold_a_server_until_killed() {
    let Ok(file) = std::env::var("WEIR_TESTKIT_ADDRESS_FILE") else {
        return;
    };
    let mut server = Server::private(&Options::default());
    // The watchdog must also end a paused server.
    server.pause();
    std::fs::write(file, format!("{}\n", server.address())).unwrap();
    // In a loop, since parking may end spuriously, which would drop the server.
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn a_killed_test_process_leaves_nothing_behind() {
    if crate::skip("redis") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let address_file = directory.path().join("address");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "redis::tests::hold_a_server_until_killed"])
        .env("WEIR_TESTKIT_ADDRESS_FILE", &address_file)
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let read = || std::fs::read_to_string(&address_file).unwrap_or_default();
    until("the child's server", READY_TIMEOUT, async || read().ends_with('\n')).await;
    let address = read().trim().to_owned();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    assert!(files() > 1 || find::local().is_none(), "the child's server should be in {directory:?}");
    tokio::net::TcpStream::connect(&address).await.unwrap();

    child.kill().unwrap();
    child.wait().unwrap();
    until("the orphaned server to end", READY_TIMEOUT, async || {
        tokio::net::TcpStream::connect(&address).await.is_err()
    })
    .await;
    until("its files to go", READY_TIMEOUT, async || files() == 1).await;
}
