//! `weir keys`: a rotation that is killed goes on where it was, runs beside servers that seal with different keys, and afterwards
//! nothing needs the old key.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use serde_json::json;

use super::fixtures::{Api, body, get, now, submit};
use super::stored_form::{caller_of, settings, submit_number};
use crate::fixtures::{Store, on_each_engine, weir};

const A: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
const B: &str = "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const OTHER_A: &str = "a:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

/// The store of a server, for commands.
#[derive(Clone)]
struct StoreOf {
    data: String,
    store: String,
}

impl StoreOf {
    fn new(api: &Api) -> Self {
        let store = api.running.database.as_ref().map_or("embedded", |database| database.url());
        Self { data: api.running.weir.data_dir().display().to_string(), store: store.to_owned() }
    }

    fn command(&self, keys: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
            command.env_remove(name);
        }
        command.arg("keys").args(arguments).args(["--data", &self.data, "--store", &self.store]);
        command
            .env("WEIR_REQUEST_KEYS", keys)
            .env("WEIR_POSTGRES_TIMEOUT", "9s")
            .env("WEIR_HTTP_TIMEOUT", "10s");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The exit code and all output.
    async fn run(&self, keys: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let mut command = self.command(keys, arguments);
        let Output { status, stdout, stderr } =
            tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        (status.code(), [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat())
    }
}

fn expect((code, output): (Option<i32>, String), expected: i32, parts: &[&str]) {
    assert_eq!(code, Some(expected), "{output}");
    for part in parts {
        assert!(output.contains(part), "{part:?} is not in: {output}");
    }
    for key in [A, B] {
        assert!(!output.contains(&key[2..]), "{output}");
    }
}

/// Kills a command once it has reported progress.
fn kill_in_progress(mut command: Command) {
    let mut process: Child = command.spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().contains("encrypted so far")),
        "it ended before it could be killed"
    );
    process.kill().unwrap();
    process.wait().unwrap();
}

async fn a_rotation_that_is_killed_goes_on_and_frees_the_old_key(store: Store) {
    let mut all = settings();
    all.push(("WEIR_REQUEST_KEYS", A));
    let mut api = Api::start_with(store, &all).await;
    let caller = caller_of(&api.running.weir.base_url());
    let mut ids = Vec::new();
    for n in 0..40 {
        let mut sent = body(&format!("key-{n}"), "pay", json!(n));
        sent["callbackUrl"] = json!("https://example.com/hook");
        ids.push(submit(&caller, &sent).await.json()["requestId"].as_str().unwrap().to_owned());
    }
    for (id, end) in [
        (&ids[0], json!({"status": "COMPLETED", "result": {"ok": true}})),
        (&ids[1], json!({"status": "FAILED", "failureMessage": "declined"})),
    ] {
        api.begin(id).await;
        assert_eq!(api.call_back(id, &end, now()).await.status, 200);
    }
    let target = StoreOf::new(&api);
    // Another process may use a database, but not the file of the embedded engine.
    if store == Store::Embedded {
        expect(target.run(A, &["check"]).await, 1, &["another weir process"]);
        api.running.weir.kill_9();
    }
    let both = format!("{B},{A}");
    expect(target.run(A, &["check"]).await, 0, &["key \"a\"", "in use by 40 requests", "everything"]);
    for wrong in [B, OTHER_A] {
        expect(target.run(wrong, &["check"]).await, 1, &["40 requests cannot be decrypted", "payload"]);
    }
    expect(target.run(B, &["rotate"]).await, 1, &["WEIR_REQUEST_KEYS", "\"a\""]);
    expect(target.run(OTHER_A, &["rotate"]).await, 1, &["another key named \"a\"", "a name of its own"]);
    let slow = target.command(&both, &["rotate", "--per-second", "10"]);
    tokio::task::spawn_blocking(move || kill_in_progress(slow)).await.unwrap();
    let (code, output) = target.run(&both, &["check"]).await;
    assert_eq!(code, Some(0), "half a rotation loses nothing: {output}");
    assert!(!output.contains("in use by 0 requests"), "both keys are in use: {output}");
    expect(target.run(&both, &["rotate"]).await, 0, &["nothing is encrypted with another key"]);
    expect(target.run(&both, &["rotate"]).await, 0, &["\n0 requests encrypted"]);
    expect(target.run(B, &["check"]).await, 0, &["in use by 40 requests", "everything can be decrypted"]);
    // A server that never had the old key finds everything.
    all.extend([("WEIR_REQUEST_KEYS", B), ("WEIR_ROLES", "api")]);
    let second = match store {
        Store::Embedded => {
            let builder = weir().data_dir(&target.data);
            all.iter().fold(builder, |builder, (name, value)| builder.env(name, value)).spawn().await
        }
        Store::Postgres => api.running.second_with(&all).await,
    };
    let caller = caller_of(&second.base_url());
    assert_eq!(get(&caller, &ids[0]).await["result"], json!({"ok": true}));
    assert_eq!(get(&caller, &ids[1]).await["failureMessage"], json!("declined"));
    for (n, id) in ids.iter().enumerate() {
        let answer = submit(&caller, &body(&format!("key-{n}"), "pay", json!(n))).await;
        assert_eq!((answer.json()["requestId"].as_str(), answer.status), (Some(id.as_str()), 202));
    }
}

on_each_engine!(a_rotation_that_is_killed_goes_on_and_frees_the_old_key);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_beside_servers_with_different_first_keys_loses_and_doubles_nothing() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let (old_first, new_first) = (format!("{A},{B}"), format!("{B},{A}"));
    let mut first = settings();
    first.push(("WEIR_REQUEST_KEYS", &old_first));
    let api = Api::start_with(Store::Postgres, &first).await;
    let mut second = settings();
    second.extend([("WEIR_REQUEST_KEYS", new_first.as_str()), ("WEIR_ROLES", "api")]);
    let second = api.running.second_with(&second).await;
    let callers = [caller_of(&api.running.weir.base_url()), caller_of(&second.base_url())];
    let target = StoreOf::new(&api);
    let is_rotating = AtomicBool::new(true);
    let rotate = async {
        for _ in 0..2 {
            let (code, output) = target.run(&new_first, &["rotate", "--per-second", "100"]).await;
            assert!(code == Some(0) || output.contains("put \"b\" first on all servers"), "{output}");
        }
        is_rotating.store(false, Ordering::SeqCst);
    };
    let load = async {
        let mut accepted = Vec::new();
        while is_rotating.load(Ordering::SeqCst) || accepted.len() < 100 {
            let keys = accepted.len()..accepted.len() + 10;
            let both = keys.map(|n| {
                let [old, new] = &callers;
                async move { tokio::join!(submit_number(old, n), submit_number(new, n)) }
            });
            for ((id, replayed), (other_id, other_replayed)) in join_all(both).await {
                assert_eq!((&id, replayed), (&other_id, !other_replayed), "each key is accepted once");
                accepted.push(id);
            }
        }
        accepted
    };
    let ((), accepted) = tokio::join!(rotate, load);
    for (n, id) in accepted.iter().enumerate() {
        assert_eq!(submit_number(&callers[n % 2], n).await, (id.clone(), true));
    }
    drop(api.running.weir);
    expect(target.run(&new_first, &["rotate"]).await, 0, &["nothing is encrypted with another key"]);
    let count = format!("{} requests checked", accepted.len());
    expect(target.run(B, &["check"]).await, 0, &[&count, "everything can be decrypted"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_supplies_the_keys_and_its_failure_is_one_sentence() {
    let api = Api::start_with(
        Store::Embedded,
        &[("WEIR_KEYS_COMMAND", "echo 'c:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI='")],
    )
    .await;
    api.accepted(&api.caller("acme"), "k").await;
    assert!(!api.running.weir.data_dir().join("request.key").exists(), "no key is created");
    assert!(!api.log_lines().iter().any(|line| line.contains("AgICAgIC")), "no line has the key");
    let data = tempfile::tempdir().unwrap();
    let (code, stderr) = start(data.path(), "echo AgICAgICAgICAgIC; exit 7");
    assert_eq!((code, stderr.trim_end().lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("keys.command") && stderr.contains("exit status: 7"), "{stderr}");
    assert!(!stderr.contains("AgIC"), "{stderr}");
}

/// Starts a server that must fail.
fn start(data: &Path, command: &str) -> (Option<i32>, String) {
    let mut weir = Command::new(env!("CARGO_BIN_EXE_weir"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
        weir.env_remove(name);
    }
    weir.args(["serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--data"]).arg(data);
    let mut process =
        weir.env("WEIR_KEYS_COMMAND", command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = String::new();
    process.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (process.wait().unwrap().code(), stderr)
}
