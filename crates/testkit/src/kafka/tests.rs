//! Tests of what other crates rely on, against real brokers.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::instance::READY_TIMEOUT;
use crate::wait::until;

/// Requests the topic's metadata, which creates it, and waits until it is listed.
async fn create_topic(broker: &Broker, name: &'static str) {
    let address = broker.address();
    run_blocking(move || protocol::metadata(address, Some(name))).await.unwrap();
    until("the topic", READY_TIMEOUT, async || broker.topics().await.iter().any(|topic| topic == name)).await;
}

#[tokio::test]
async fn a_shared_broker_creates_topics_on_first_use() {
    if crate::skip("kafka") {
        return;
    }
    let broker = run_blocking(Broker::shared).await;
    create_topic(broker, "first-use").await;
    assert_eq!(broker.url(), format!("kafka://{}", broker.addresses));
    let external = Broker::external(&format!("{}, localhost:1", broker.address()));
    assert_eq!(external.address(), broker.address());
    assert_eq!(external.url(), format!("kafka://{},localhost:1", broker.address()));
}

#[tokio::test]
async fn topics_survive_a_stop_and_a_crash_and_the_port_stays() {
    if crate::skip("kafka") {
        return;
    }
    let (mut broker, proxy) = Broker::private_with_proxy().await;
    let address = broker.address();
    let own = protocol::metadata(address, None).unwrap();
    assert_eq!(own.brokers, [("127.0.0.1".to_owned(), i32::from(address.port()))]);
    let addr = proxy.addr();
    let proxied = run_blocking(move || protocol::metadata(addr, None)).await.unwrap();
    assert_eq!(proxied.brokers, [("127.0.0.1".to_owned(), i32::from(addr.port()))]);
    create_topic(&broker, "kept").await;

    broker.stop().await;
    assert!(protocol::probe(address).is_err());
    broker.start().await;
    assert_eq!(broker.address(), address);
    assert_eq!(broker.topics().await, ["kept"]);

    broker.crash();
    assert!(protocol::probe(address).is_err());
    broker.start().await;
    assert_eq!(broker.topics().await, ["kept"]);

    broker.pause();
    let silent = tokio::time::timeout(Duration::from_millis(200), broker.topics()).await;
    assert!(silent.is_err(), "a paused broker must not answer");
    broker.resume();
    // The log is not checked: a broker that was crashed and paused may log errors.
    assert_eq!(broker.topics().await, ["kept"]);
}

/// Not a test: [`a_killed_test_process_leaves_nothing_behind`] runs it in a process that it kills.
#[test]
#[ignore = "run as a child process by another test"]
fn hold_a_broker_until_killed() {
    let Ok(file) = std::env::var("WEIR_TESTKIT_ADDRESS_FILE") else {
        return;
    };
    let broker = Broker::private();
    std::fs::write(file, format!("{}\n", broker.address())).unwrap();
    // In a loop, since parking may end spuriously, which would drop the broker.
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn a_killed_test_process_leaves_nothing_behind() {
    if crate::skip("kafka") {
        return;
    }
    // Installed here, so that the child need not wait for it.
    run_blocking(|| find::source().map(drop).unwrap_or_else(|reason| panic!("{reason}"))).await;
    let directory = tempfile::tempdir().unwrap();
    let address_file = directory.path().join("address");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "kafka::tests::hold_a_broker_until_killed"])
        .env("WEIR_TESTKIT_ADDRESS_FILE", &address_file)
        .env("TMPDIR", directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let read = || std::fs::read_to_string(&address_file).unwrap_or_default();
    until("the child's broker", READY_TIMEOUT, async || read().ends_with('\n')).await;
    let address = read().trim().to_owned();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    assert!(files() > 1 || find::local().is_none(), "the child's broker should be in {directory:?}");
    tokio::net::TcpStream::connect(&address).await.unwrap();

    child.kill().unwrap();
    child.wait().unwrap();
    until("the orphaned broker to end", READY_TIMEOUT, async || {
        tokio::net::TcpStream::connect(&address).await.is_err()
    })
    .await;
    until("its files to go", READY_TIMEOUT, async || files() == 1).await;
}
