//! Tests of the handle against a shell script that stands in for `weir`.

use std::os::unix::process::ExitStatusExt;

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A file in the repository: one written by a test could still be open for writing in another test's fork, and running it
/// would fail with "Text file busy".
const FAKE_WEIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/process/fake_weir.sh");

#[tokio::test]
async fn runs_with_its_arguments_and_environment_until_dropped() {
    let weir = Weir::builder(FAKE_WEIR).arg("--roles").arg("api").env("GREETING", "hello").spawn().await;
    assert_eq!(weir.base_url(), format!("http://{}", weir.addr()));
    assert_eq!(weir.admin_key(), "secret");
    weir.wait_for_log(|line| line == "greeting hello, inherited none", TEST_TIMEOUT).await;
    assert!(weir.log_lines().contains(&"arguments serve --roles api".to_owned()));

    let (pid, data) = (Pid::from_child(weir.running()), weir.data_dir().to_owned());
    assert!(data.exists());
    drop(weir);
    assert!(rustix::process::test_kill_process(pid).is_err());
    assert!(!data.exists());
}

#[tokio::test]
async fn terminates_and_restarts_on_the_same_port_with_the_same_data() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let mut weir = Weir::builder(FAKE_WEIR).data_dir(&data).spawn().await;
    let (addr, pid) = (weir.addr(), weir.pid());

    weir.terminate();
    assert_eq!(weir.wait(TEST_TIMEOUT).await.code(), Some(0));
    assert_eq!(weir.log_lines().last().unwrap(), "goodbye");

    weir.restart().await;
    assert_eq!(weir.addr(), addr);
    assert_ne!(weir.pid(), pid);

    weir.kill_9();
    weir.restart().await;
    weir.restart().await;
    drop(weir);
    assert!(data.join("admin.key").exists(), "an explicit data directory is kept");
}

#[tokio::test]
async fn a_paused_process_handles_nothing_until_resumed() {
    let mut weir = Weir::builder(FAKE_WEIR).spawn().await;
    weir.pause();
    weir.terminate();
    let exited = becomes_true(Duration::from_millis(100), async || {
        weir.child.as_mut().unwrap().try_wait().unwrap().is_some()
    });
    assert!(!exited.await);
    weir.resume();
    assert_eq!(weir.wait(TEST_TIMEOUT).await.code(), Some(0));
}

#[tokio::test]
async fn reports_the_signal_that_ended_it() {
    let mut weir = Weir::builder(FAKE_WEIR).spawn().await;
    signal::send(Pid::from_child(weir.running()), Signal::KILL);
    assert_eq!(weir.wait(TEST_TIMEOUT).await.signal(), Some(Signal::KILL.as_raw()));
}

#[tokio::test]
#[should_panic(expected = "before it was ready (exit status: 2); its output:\nWEIR_STORE is nonsense")]
async fn an_early_exit_shows_the_output() {
    Weir::builder(FAKE_WEIR).env("COMPLAINT", "WEIR_STORE is nonsense").spawn().await;
}

#[test]
fn the_address_is_found_in_prose_and_in_json() {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
    let expected = Some(("http", addr));
    assert_eq!(parse_addr("weir ready on https://127.0.0.1:8080, store sqlite"), Some(("https", addr)));
    assert_eq!(parse_addr("weir ready on http://127.0.0.1:8080, store sqlite"), expected);
    assert_eq!(parse_addr(r#"{"message":"weir ready","url":"http://127.0.0.1:8080"}"#), expected);
    assert_eq!(parse_addr("weir ready on http://0.0.0.0:8080"), None);
}
