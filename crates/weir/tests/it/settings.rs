//! The start of a server: refused settings, generated secrets, tokens.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use weir_server::auth::jwt::{RequiredClaims, TokenVerifier};
use weir_testkit::http::Client;
use weir_testkit::postgres;

use crate::fixtures::{Running, Store, TEST_TIMEOUT, configure, weir};

/// Runs the binary until it exits, with only these variables. A server that should not have started is killed after a minute.
fn run(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", "60", env!("CARGO_BIN_EXE_weir")]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("WEIR_")) {
        command.env_remove(name);
    }
    let directory = tempfile::tempdir().unwrap();
    command.args(arguments).envs(environment.iter().copied()).current_dir(directory.path());
    command.output().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_for_other_versions_stops_the_start_with_one_sentence_and_code_2() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let running = Running::start(Store::Postgres).await;
    let database = running.database.as_ref().unwrap();
    let url = database.url().to_owned();
    for (state, advice) in [
        ("oldest_version = 1000", "start a newer weir"),
        ("oldest_version = 1, version = 8", "start an earlier weir first"),
    ] {
        database.execute(&format!("UPDATE weir_schema_state SET {state}")).await;
        let environment = [("WEIR_STORE", url.clone()), ("WEIR_LISTEN", "127.0.0.1:0".to_owned())];
        let run =
            move || run(&["serve"], &environment.each_ref().map(|(name, value)| (*name, value.as_str())));
        let output = tokio::task::spawn_blocking(run).await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.trim_end().lines().count()), (Some(2), 1), "{stderr}");
        assert!(stderr.contains(advice) && stderr.contains("schema"), "{stderr}");
    }
}

#[test]
fn a_wrong_setting_stops_the_start_with_one_sentence_and_code_2() {
    for (arguments, environment, parts) in [
        (vec!["--listen", "nowhere"], vec![], ["--listen", "nowhere", "127.0.0.1:8080"]),
        (vec![], vec![("WEIR_LISTEN", "256.1.1.1:1")], ["WEIR_LISTEN", "256.1.1.1:1", "127.0.0.1:8080"]),
        (vec!["--roles", "cook"], vec![], ["--roles", "cook", "sender"]),
        (vec!["--config", "missing.toml"], vec![], ["config", "missing.toml", "read"]),
        (vec![], vec![("WEIR_JWKS_FILE", "missing.json")], ["WEIR_JWKS_FILE", "missing.json", "JWKS"]),
        (
            vec!["--cache", "redis+sentinel://a:26379,b:26379/mymaster"],
            vec![],
            ["--cache", "Sentinel is not supported", "an address that follows the primary"],
        ),
        (
            vec!["--store", "postgres://a,b/weir?target_session_attrs=any"],
            vec![],
            ["--store", "host:port[,host:port]", "target_session_attrs, if given, read-write"],
        ),
        (vec!["--data", "/proc/nope"], vec![], ["data", "/proc/nope", "directory"]),
    ] {
        let output = run(&[&["serve"][..], &arguments].concat(), &environment);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_password_in_a_wrong_store_is_not_repeated() {
    for store in ["postgres://u:hunter2@[/d", "mysql://u:hunter2@h/d", "postgres://u:hunter2@h/d?sslmode=x"] {
        let output = run(&["serve", "--store", store], &[]);
        let printed =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(2), "{printed}");
        assert!(printed.contains("--store") && !printed.contains("hunter2"), "{printed}");
    }
}

#[tokio::test]
async fn generated_secrets_are_private_and_survive_restarts() {
    let mut server = Running::start(Store::Embedded).await;
    let data = server.weir.data_dir().to_owned();
    for name in ["admin.key", "jwt.secret", "weir.db", "weir.db-wal"] {
        let mode = data.join(name).metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{name}");
    }
    let is_warning = |line: &str| line.contains("other users of this machine");
    assert!(!server.weir.log_lines().iter().any(|line| is_warning(line)), "there is nothing to warn of");
    let key = server.weir.admin_key();
    server.weir.kill_9();
    std::fs::set_permissions(data.join("admin.key"), PermissionsExt::from_mode(0o644)).unwrap();
    server.weir.restart().await;
    assert_eq!(server.weir.admin_key(), key);
    let advice = format!("chmod go-rwx {}", data.join("admin.key").display());
    server.weir.wait_for_log(|line| is_warning(line) && line.contains(&advice), TEST_TIMEOUT).await;
    assert!(server.weir.log_lines().iter().all(|line| !line.contains(&key)), "a secret was logged");
}

#[tokio::test]
async fn an_admin_key_in_the_environment_is_used() {
    // With a line break, as in a mounted secret.
    let weir = weir().env("WEIR_ADMIN_KEY", "a-key-of-more-than-16-bytes\n").spawn().await;
    let with = |key: &str| Client::new(weir.base_url()).with_header("x-admin-key", key);
    assert_eq!(with("a-key-of-more-than-16-bytes").get("/admin/audit").await.unwrap().status, 200);
    assert_eq!(with("a-key-of-more-than-16-byte").get("/admin/audit").await.unwrap().status, 401);
    assert!(!weir.data_dir().join("admin.key").exists(), "no key is generated when one is set");
}

#[tokio::test]
async fn an_admin_key_that_does_not_fit_into_a_header_stops_the_start() {
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("admin.key"), "a key with spaces in it\n").unwrap();
    let path = data.path().to_str().unwrap();
    let from_file = run(&["serve", "--listen", "127.0.0.1:0", "--data", path], &[]);
    let from_environment = run(&["serve"], &[("WEIR_ADMIN_KEY", "a key with spaces in it")]);
    for (output, name) in [(from_file, "admin.key"), (from_environment, "WEIR_ADMIN_KEY")] {
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(name) && stderr.contains("white space") && !stderr.contains("spaces in"),
            "{stderr}"
        );
    }
    std::fs::write(data.path().join("admin.key"), "a-key-that-somebody-wrote\n").unwrap();
    let weir = weir().data_dir(data.path()).spawn().await;
    let operator = Client::new(weir.base_url()).with_header("x-admin-key", "a-key-that-somebody-wrote");
    assert_eq!(operator.get("/admin/audit").await.unwrap().status, 200);
}

#[tokio::test]
async fn a_second_server_on_the_same_directory_is_refused() {
    let server = Running::start(Store::Embedded).await;
    let data = server.weir.data_dir().to_str().unwrap();
    let output = run(&["serve", "--listen", "127.0.0.1:0", "--data", data], &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("another weir process") && stderr.contains(data), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_does_not_wait_for_a_postgres_that_refuses_the_connection() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = postgres::Server::shared().database("refused").await;
    let name = database.url().rsplit('/').next().unwrap();
    let missing = database.url().replace(name, "no_such_database");
    let output = run(&["serve", "--listen", "127.0.0.1:0", "--store", &missing], &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("no_such_database") && stderr.contains("does not exist"), "{stderr}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("waiting"), "it waited");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_not_in_utf_8_stops_the_start() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = postgres::Server::shared().database("encoding").await;
    let name = database.url().rsplit('/').next().unwrap();
    let latin = format!("{name}_latin1");
    let create = format!("CREATE DATABASE {latin} TEMPLATE template0 LOCALE 'C' ENCODING 'LATIN1'");
    database.execute(&create).await;
    let store = database.url().replace(name, &latin);
    let output = run(&["serve", "--listen", "127.0.0.1:0", "--store", &store], &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for part in ["store", &latin, "LATIN1", "must be UTF8"] {
        assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
    }
    database.execute(&format!("DROP DATABASE {latin} WITH (FORCE)")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_may_lose_commits_must_be_allowed_explicitly() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let settings = vec![("fsync".to_owned(), "off".to_owned())];
    let server = postgres::Server::with_options(&postgres::Options { settings, ..Default::default() });
    let database = server.database("unsafe").await;
    let output = run(&["serve", "--listen", "127.0.0.1:0", "--store", database.url()], &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("fsync is off") && stderr.contains("postgres.allow_unsafe_durability"),
        "{stderr}"
    );
    let allowed =
        weir().env("WEIR_STORE", database.url()).env("WEIR_POSTGRES_ALLOW_UNSAFE_DURABILITY", "true");
    let weir = allowed.spawn().await;
    let is_warning = |line: &str| line.contains("WARN") && line.contains("fsync is off");
    weir.wait_for_log(is_warning, TEST_TIMEOUT).await;
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_the_address() {
    let server = Running::start(Store::Embedded).await;
    let address = server.weir.addr().to_string();
    let output = run(&["serve", "--listen", &address], &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains(&address) && stderr.contains("in use"), "{stderr}");
}

#[tokio::test]
async fn the_token_command_signs_with_the_servers_own_secret() {
    let server = Running::start(Store::Embedded).await;
    let data = server.weir.data_dir().to_str().unwrap();
    let scopes = "requests:create,requests:read";
    let output = run(
        &["token", "--sub", "a@b.c", "--tenant", "acme", "--scope", scopes, "--ttl", "2h", "--data", data],
        &[],
    );
    assert!(output.status.success());
    let token = String::from_utf8(output.stdout).unwrap();
    let secret = std::fs::read_to_string(server.weir.data_dir().join("jwt.secret")).unwrap();
    let claims = TokenVerifier::from_secret(secret.trim(), &RequiredClaims::default())
        .verify(token.trim())
        .expect("a valid token");
    assert_eq!((claims.sub.as_str(), claims.tenant_id.as_deref()), ("a@b.c", Some("acme")));
    assert!(claims.allows("requests:create") && claims.allows("requests:read"));
    let left = claims.exp - u64::try_from(jiff::Timestamp::now().as_second()).unwrap();
    assert!((7_000..=7_200).contains(&left), "{left}");
}

#[tokio::test]
async fn the_token_command_sets_the_required_issuer_and_audience() {
    let expected = [("WEIR_AUTH_ISSUER", "https://login.example"), ("WEIR_AUTH_AUDIENCE", "weir")];
    let server = Running::start_with(Store::Embedded, &expected).await;
    let data = server.weir.data_dir().to_str().unwrap();
    let token = |environment: &[(&str, &str)]| {
        let output = run(&["token", "--sub", "a@b.c", "--data", data], environment);
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    for (token, status) in [(token(&expected), 200), (token(&expected[..1]), 401), (token(&[]), 401)] {
        let caller = server.client().with_header("authorization", &format!("Bearer {token}"));
        assert_eq!(caller.get("/api/v1/limits/me").await.unwrap().status, status);
    }
}

#[tokio::test]
async fn unusable_keys_of_a_jwks_are_logged() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("jwks.json");
    let good = include_str!("../../../server/src/auth/jwt/testdata/jwks.json");
    let mut set: serde_json::Value = serde_json::from_str(good).unwrap();
    let keys = set["keys"].as_array_mut().unwrap();
    let modulus = format!("{}A", "u".repeat(170));
    keys.push(serde_json::json!({"kty": "RSA", "kid": "short-1", "n": modulus, "e": "AQAB"}));
    let mut encrypting = keys[2].clone();
    encrypting["kid"] = "enc-1".into();
    encrypting["use"] = "enc".into();
    keys.push(encrypting);
    std::fs::write(&file, set.to_string()).unwrap();
    let weir = weir().env("WEIR_JWKS_FILE", &file).spawn().await;
    for (kid, reason) in [("short-1", "1024 bits"), ("enc-1", "verify signatures")] {
        weir.wait_for_log(|line| line.contains(kid) && line.contains(reason), TEST_TIMEOUT).await;
    }
    assert!(weir.log_lines().iter().all(|line| !line.contains("rsa-1")), "rsa-1 is usable");
}

#[tokio::test]
async fn flags_win_over_the_environment_which_wins_over_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("weir.toml");
    std::fs::write(&file, "roles = [\"sender\"]\n[log]\nlevel = \"error\"\n").unwrap();
    let from_file = weir().env("WEIR_CONFIG", file.to_str().unwrap()).spawn().await;
    let message = async |weir: &weir_testkit::process::Weir| {
        let body = Client::new(weir.base_url()).get("/api/config/x").await.unwrap().json();
        body["message"].as_str().unwrap().to_owned()
    };
    let sender_message = message(&from_file).await;
    assert!(sender_message.contains("/docs"), "a sender has no such route: {sender_message}");
    let flag = weir()
        .env("WEIR_CONFIG", file.to_str().unwrap())
        .env("WEIR_ROLES", "worker")
        .arg("--roles")
        .arg("api")
        .spawn()
        .await;
    let api_message = message(&flag).await;
    assert!(api_message.contains("No configuration"), "{api_message}");
}

/// Damages the data directory of a server with `damage` and checks that the next start refuses it.
async fn expect_refusal_after(damage: impl Fn(&std::path::Path), trace: &str) {
    let mut server = Running::start(Store::Embedded).await;
    let data = server.weir.data_dir().to_owned();
    configure(&server.client(), "u", 10, 60).await;
    server.weir.kill_9();
    damage(&data);
    let output = run(&["serve", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()], &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for part in ["data", "weir.db", trace, "backup", "--data"] {
        assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
    }
    let length = data.join("weir.db").metadata().map_or(0, |metadata| metadata.len());
    assert_eq!(length, 0, "no new database is created");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_database_beside_its_write_ahead_log_is_refused() {
    let empty = |data: &std::path::Path| {
        std::fs::write(data.join("weir.db"), "").unwrap();
        for secret in ["admin.key", "jwt.secret", "webhook.secret", "request.key"] {
            std::fs::remove_file(data.join(secret)).unwrap();
        }
        assert!(data.join("weir.db-wal").metadata().unwrap().len() > 0);
    };
    expect_refusal_after(empty, "weir.db-wal").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_database_beside_secrets_is_refused() {
    let remove = |data: &std::path::Path| {
        for file in ["weir.db", "weir.db-wal", "weir.db-shm"] {
            std::fs::remove_file(data.join(file)).unwrap();
        }
    };
    expect_refusal_after(remove, "admin.key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_that_exist_before_the_first_start_are_used() {
    let data = tempfile::tempdir().unwrap();
    for secret in ["admin.key", "jwt.secret"] {
        std::fs::write(data.path().join(secret), "0123456789abcdef0123456789abcdef\n").unwrap();
    }
    let weir = weir().data_dir(data.path()).spawn().await;
    assert_eq!(weir.admin_key().trim(), "0123456789abcdef0123456789abcdef");
}

#[test]
fn a_failed_first_start_does_not_prevent_the_next() {
    let data = tempfile::tempdir().unwrap();
    let path = data.path().to_str().unwrap();
    let start = |keys: &str| {
        run(&["serve", "--listen", "127.0.0.1:0", "--data", path], &[("WEIR_REQUEST_KEYS", keys)])
    };
    for _ in 0..2 {
        let output = start("no key");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("WEIR_REQUEST_KEYS") && output.status.code() == Some(2), "{stderr}");
    }
}
