//! What the tests of the other crates rely on, against real brokers.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::instance::READY_WITHIN;
use crate::wait::until;

/// Asking for it makes it; the broker may need a moment to tell everyone.
async fn create_topic(broker: &Broker, name: &'static str) {
    let address = broker.address();
    unblocked(move || protocol::metadata(address, Some(name))).await.unwrap();
    until("the topic", READY_WITHIN, async || broker.topics().await.iter().any(|topic| topic == name)).await;
}

#[tokio::test]
async fn a_shared_broker_makes_topics_on_first_use() {
    if crate::skip("kafka") {
        return;
    }
    let broker = unblocked(Broker::shared).await;
    create_topic(broker, "first-use").await;
    assert_eq!(broker.url(), format!("kafka://{}", broker.addresses));
    let given = Broker::external(&format!("{}, localhost:1", broker.address()));
    assert_eq!(given.address(), broker.address());
    assert_eq!(given.url(), format!("kafka://{},localhost:1", broker.address()));
}

#[tokio::test]
async fn what_was_stored_survives_a_stop_and_a_crash_and_the_port_stays() {
    if crate::skip("kafka") {
        return;
    }
    let (mut broker, proxy) = Broker::private_with_proxy().await;
    let address = broker.address();
    let own = protocol::metadata(address, None).unwrap();
    assert_eq!(own.brokers, [("127.0.0.1".to_owned(), i32::from(address.port()))]);
    let addr = proxy.addr();
    let proxied = unblocked(move || protocol::metadata(addr, None)).await.unwrap();
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
    // Its log is no measure: a broker that was crashed and paused may report errors of its own.
    assert_eq!(broker.topics().await, ["kept"]);
}

/// Not a test of its own: what [`a_killed_test_process_leaves_nothing_behind`] runs in a process that it kills.
#[test]
#[ignore = "run as a child process by another test"]
fn hold_a_broker_until_killed() {
    let Ok(file) = std::env::var("WEIR_TESTKIT_ADDRESS_FILE") else {
        return;
    };
    let broker = Broker::private();
    std::fs::write(file, format!("{}\n", broker.address())).unwrap();
    // Parking may end without a reason, and the broker would end with it.
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn a_killed_test_process_leaves_nothing_behind() {
    if crate::skip("kafka") {
        return;
    }
    // Found or made here, so that the child need not wait for it.
    unblocked(|| find::source().map(drop).unwrap_or_else(|reason| panic!("{reason}"))).await;
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
    until("the child's broker", READY_WITHIN, async || read().ends_with('\n')).await;
    let address = read().trim().to_owned();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    assert!(files() > 1 || find::local().is_none(), "the child's broker should be in {directory:?}");
    tokio::net::TcpStream::connect(&address).await.unwrap();

    child.kill().unwrap();
    child.wait().unwrap();
    until("the orphaned broker to end", READY_WITHIN, async || {
        tokio::net::TcpStream::connect(&address).await.is_err()
    })
    .await;
    until("its files to go", READY_WITHIN, async || files() == 1).await;
}
