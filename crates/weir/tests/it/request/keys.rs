//! What requests are sealed with: a key that is missing is noticed at the start, and never costs more than the result.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::json;
use weir_testkit::wait;

use super::fixtures::{Api, KEYS, get, now};
use crate::fixtures::{PATIENCE, Store, on_each_engine};

const OTHER: (&str, &str) = ("WEIR_REQUEST_KEYS", "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=");
const OTHER_OF_THE_SAME_NAME: (&str, &str) =
    ("WEIR_REQUEST_KEYS", "a:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=");

/// A process that does not outlive its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a server that must not start, and returns its exit code and what it said.
async fn refused(data: &Path, environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
        command.env_remove(name);
    }
    command.args(["serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--data"]).arg(data);
    command.envs(environment.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Process(command.spawn().unwrap());
    let mut status = None;
    wait::until("the server has exited", PATIENCE, async || {
        status = process.0.try_wait().unwrap();
        status.is_some()
    })
    .await;
    let mut said = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (status.and_then(|status| status.code()), said)
}

fn check((code, said): (Option<i32>, String), parts: &[&str]) {
    assert_eq!(code, Some(2), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{said:?} lacks {part:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_generated_key_is_lost_does_not_start() {
    let mut api = Api::start(Store::Embedded).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let data = api.running.weir.data_dir().to_owned();
    let (file, kept) = (data.join("request.key"), data.join("request.key.kept"));
    api.running.weir.kill_9();
    std::fs::rename(&file, &kept).unwrap();
    let parts = ["WEIR_REQUEST_KEYS", file.to_str().unwrap(), "\"generated\"", id.as_str()];
    check(refused(&data, &[]).await, &parts);
    // By now there is a new file.
    check(refused(&data, &[]).await, &parts);
    std::fs::rename(&kept, &file).unwrap();
    api.running.weir.restart().await;
    let caller = api.caller("acme");
    assert_eq!(get(&caller, &id).await["status"], "ACCEPTED");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_cannot_open_what_others_have_sealed_does_not_start() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let api = Api::start_with(Store::Postgres, &[KEYS]).await;
    let id = api.accepted(&api.caller("acme"), "k").await;
    let url = api.running.database.as_ref().unwrap().url();
    let data = tempfile::tempdir().unwrap();
    let store = ("WEIR_STORE", url);
    for wrong in [OTHER, OTHER_OF_THE_SAME_NAME] {
        check(refused(data.path(), &[store, wrong]).await, &["WEIR_REQUEST_KEYS", "\"a\"", id.as_str()]);
    }
    check(refused(data.path(), &[store]).await, &["WEIR_REQUEST_KEYS", "request.key", "\"a\""]);
    let sender = [OTHER, ("WEIR_ROLES", "sender")];
    drop(api.running.second_with(&sender).await);
    let both = format!("{},{}", OTHER.1, KEYS.1);
    drop(api.running.second_with(&[("WEIR_REQUEST_KEYS", &both)]).await);
}

async fn a_result_that_does_not_open_leaves_the_rest_of_the_status(store: Store) {
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

on_each_engine!(a_result_that_does_not_open_leaves_the_rest_of_the_status);
