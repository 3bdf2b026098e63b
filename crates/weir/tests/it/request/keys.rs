//! Encryption keys of payloads: a missing key is noticed at the start, and later costs no more than the result.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::json;
use weir_testkit::wait;

use super::fixtures::{Api, KEYS, get, now};
use crate::fixtures::{Store, TEST_TIMEOUT, on_each_engine};

const OTHER: (&str, &str) = ("WEIR_REQUEST_KEYS", "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=");
const SAME_NAME_OTHER_KEY: (&str, &str) =
    ("WEIR_REQUEST_KEYS", "a:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=");

/// A process that is killed when the test ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a server that must not start, and returns its exit code and error output.
async fn fail_to_start(data: &Path, environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
        command.env_remove(name);
    }
    command.args(["serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--data"]).arg(data);
    command.envs(environment.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Process(command.spawn().unwrap());
    let mut status = None;
    wait::until("the server has exited", TEST_TIMEOUT, async || {
        status = process.0.try_wait().unwrap();
        status.is_some()
    })
    .await;
    let mut stderr = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (status.and_then(|status| status.code()), stderr)
}

fn check((code, stderr): (Option<i32>, String), parts: &[&str]) {
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_generated_key_is_lost_does_not_start() {
    let mut api = Api::start(Store::Embedded).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let data = api.running.weir.data_dir().to_owned();
    let (file, moved) = (data.join("request.key"), data.join("request.key.moved"));
    api.running.weir.kill_9();
    std::fs::rename(&file, &moved).unwrap();
    let parts = ["WEIR_REQUEST_KEYS", file.to_str().unwrap(), "\"generated\"", id.as_str()];
    check(fail_to_start(&data, &[]).await, &parts);
    // The first attempt has generated a new key file.
    check(fail_to_start(&data, &[]).await, &parts);
    std::fs::rename(&moved, &file).unwrap();
    api.running.weir.restart().await;
    let caller = api.caller("acme");
    assert_eq!(get(&caller, &id).await["status"], "ACCEPTED");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_the_keys_of_stored_requests_does_not_start() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let api = Api::start_with(Store::Postgres, &[KEYS]).await;
    let id = api.accepted(&api.caller("acme"), "k").await;
    let url = api.running.database.as_ref().unwrap().url();
    let data = tempfile::tempdir().unwrap();
    let store = ("WEIR_STORE", url);
    for wrong in [OTHER, SAME_NAME_OTHER_KEY] {
        check(
            fail_to_start(data.path(), &[store, wrong]).await,
            &["WEIR_REQUEST_KEYS", "\"a\"", id.as_str()],
        );
    }
    check(fail_to_start(data.path(), &[store]).await, &["WEIR_REQUEST_KEYS", "request.key", "\"a\""]);
    let sender = [OTHER, ("WEIR_ROLES", "sender")];
    drop(api.running.second_with(&sender).await);
    let both = format!("{},{}", OTHER.1, KEYS.1);
    drop(api.running.second_with(&[("WEIR_REQUEST_KEYS", &both)]).await);
}

async fn a_result_that_cannot_be_decrypted_leaves_the_rest_readable(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.begin(&id).await;
    api.call_back(&id, &json!({"status": "COMPLETED", "result": 1}), now()).await;
    let before = get(&caller, &id).await;
    assert_eq!((&before["result"], before.get("resultError")), (&json!(1), None));
    api.lose_key_of_result(&id).await;
    let after = get(&caller, &id).await;
    assert_eq!((&after["status"], &after["result"]), (&json!("COMPLETED"), &json!(null)));
    assert!(after["resultError"].as_str().unwrap().contains("key"), "{after}");
    let stream = caller.get(&format!("/v1/requests/{id}/events")).await.unwrap();
    assert!(String::from_utf8_lossy(&stream.body).contains("resultError"), "{:?}", stream.body);
    api.wait_for_log("cannot decrypt the result of a request").await;
}

on_each_engine!(a_result_that_cannot_be_decrypted_leaves_the_rest_readable);
