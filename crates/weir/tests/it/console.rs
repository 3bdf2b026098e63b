//! What the operators' console is made of: `/`, `/admin/live`, `/admin/keys/{key}`, `/admin/near-limits`. The page itself is tested
//! in `web/`, the routes of requests in `request/operators.rs`.

use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;
use weir_testkit::process::Weir;
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, Running, Store, TEST_TIMEOUT, configure, message, on_each_engine};

/// A reader of the live stream.
struct Live {
    lines: Lines<BufReader<OwnedReadHalf>>,
    _writer: OwnedWriteHalf,
    status: u16,
}

impl Live {
    async fn open(weir: &Weir, header: &str) -> Self {
        let (reader, mut writer) = TcpStream::connect(weir.addr()).await.unwrap().into_split();
        let request = format!("GET /admin/live HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n");
        writer.write_all(request.as_bytes()).await.unwrap();
        let mut lines = BufReader::new(reader).lines();
        let first = lines.next_line().await.unwrap().unwrap();
        while !lines.next_line().await.unwrap().unwrap().is_empty() {}
        let status = first.split(' ').nth(1).unwrap().parse().unwrap();
        Self { lines, _writer: writer, status }
    }

    async fn open_with_key(weir: &Weir) -> Self {
        Self::open(weir, &format!("X-Admin-Key: {}", weir.admin_key())).await
    }

    /// The next event's name and data; `None` at the end of the stream.
    async fn next(&mut self) -> Option<(String, Value)> {
        let read = async {
            let mut name = String::new();
            while let Some(line) = self.lines.next_line().await.ok()? {
                if let Some(event) = line.strip_prefix("event: ") {
                    name = event.to_owned();
                } else if let Some(data) = line.strip_prefix("data: ") {
                    return Some((name, serde_json::from_str(data).unwrap()));
                }
            }
            None
        };
        tokio::time::timeout(TEST_TIMEOUT, read).await.expect("an event in time")
    }

    /// The first snapshot for which this is so.
    async fn snapshot_where(&mut self, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        loop {
            assert!(tokio::time::Instant::now() < deadline, "no such snapshot came");
            let (name, data) = self.next().await.expect("the stream goes on");
            if name == "snapshot" && holds(&data) {
                return data;
            }
        }
    }
}

fn token(weir: &Weir, scope: &str) -> String {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims { sub: "op".into(), exp: FAR_FUTURE, tenant_id: None, scope: Some(scope.into()) };
    jwt::sign(&secret, &claims).unwrap()
}

async fn send(client: &Client, user: &str) -> u16 {
    client.post("/api/send", &message(user, "x")).await.unwrap().status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_stream_counts_every_decision_once() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    let mut live = Live::open_with_key(&server.weir).await;
    assert_eq!(live.status, 200);
    let (name, hello) = live.next().await.unwrap();
    assert_eq!(
        (name.as_str(), &hello["readOnly"], &hello["engines"]),
        ("hello", &json!(false), &json!(["sqlite"]))
    );
    assert_eq!(live.next().await.unwrap().0, "history");
    let first = live.snapshot_where(|_| true).await;
    assert_eq!(first["engines"][0]["up"], json!(true), "{first}");
    configure(&client, "alice", 3, 60).await;
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(send(&client, "alice").await);
    }
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    let (mut allowed, mut denied) = (0, 0);
    while allowed + denied < 5 {
        let snapshot = live.snapshot_where(|_| true).await;
        allowed += snapshot["series"]["quota.allowed"].as_u64().unwrap();
        denied += snapshot["series"]["quota.denied"].as_u64().unwrap();
    }
    assert_eq!((allowed, denied), (3, 2));
    let near = live.snapshot_where(|snapshot| snapshot["nearLimits"] != json!([])).await;
    let near = &near["nearLimits"][0];
    assert_eq!((&near["key"], &near["remaining"], &near["denials"]), (&json!("alice"), &json!(0), &json!(2)));
    // A stream that is opened later has the same in its history, by the second and by the minute.
    let mut later = Live::open_with_key(&server.weir).await;
    later.next().await.unwrap();
    let (_, history) = later.next().await.unwrap();
    for ring in ["seconds", "minutes"] {
        let sum = |series: &str| -> u64 {
            history[ring]["series"][series].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum()
        };
        assert_eq!((sum("quota.allowed"), sum("quota.denied")), (3, 2), "{ring}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_may_only_read_may_watch_and_change_nothing() {
    let server = Running::start(Store::Embedded).await;
    let reader = token(&server.weir, "admin:read");
    let mut live = Live::open(&server.weir, &format!("Authorization: Bearer {reader}")).await;
    let (_, hello) = live.next().await.unwrap();
    assert_eq!((live.status, &hello["readOnly"]), (200, &json!(true)));
    let reader = server.client().with_header("authorization", &format!("Bearer {reader}"));
    for path in [
        "/admin/keys/alice",
        "/admin/near-limits",
        "/admin/requests",
        "/admin/requests/unfinished",
        "/admin/dlq/groups",
    ] {
        assert_eq!(reader.get(path).await.unwrap().status, 200, "{path}");
    }
    let cancel =
        reader.post("/admin/requests/cancel", &json!({"tenant": "acme", "dryRun": true})).await.unwrap();
    assert_eq!(cancel.status, 403);
    let stranger =
        Live::open(&server.weir, &format!("Authorization: Bearer {}", token(&server.weir, "quota:send")))
            .await;
    assert_eq!((stranger.status, Live::open(&server.weir, "X-Other: 1").await.status), (403, 401));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_are_64_streams_at_most_and_a_stop_ends_them() {
    let server = Running::start(Store::Embedded).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(Live::open_with_key(&server.weir).await);
    }
    assert!(open.iter().all(|stream| stream.status == 200));
    assert_eq!(Live::open_with_key(&server.weir).await.status, 503);
    drop(open.pop());
    wait::until("the place of a closed stream is free", TEST_TIMEOUT, async || {
        Live::open_with_key(&server.weir).await.status == 200
    })
    .await;
    server.weir.terminate();
    for mut stream in open {
        while stream.next().await.is_some() {}
    }
}

async fn a_key_shows_every_limit_and_why_it_was_denied(store: Store) {
    let server = Running::start(store).await;
    let (client, operator) = (server.client(), server.operator());
    let key = async |name: &str| {
        let answer = operator.get(&format!("/admin/keys/{name}")).await.unwrap();
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        answer.json()
    };
    let unknown = key("nobody").await;
    assert_eq!(
        (&unknown["quota"], &unknown["policies"], &unknown["remembered"]),
        (&Value::Null, &json!([]), &json!([]))
    );
    assert_eq!((&unknown["plan"]["plan"], &unknown["plan"]["subscribed"]), (&json!("FREE"), &json!(false)));
    configure(&client, "alice", 1, 60).await;
    let policy = json!({"kind": "fixed_window", "limit": 2, "window": "PT1H"});
    for name in ["login", "search"] {
        assert_eq!(operator.put(&format!("/admin/policies/{name}"), &policy).await.unwrap().status, 200);
    }
    let check = async || {
        let checks = json!({"checks": [{"policy": "login", "key": "alice"}]});
        operator.post("/v1/check", &checks).await.unwrap().json()["allowed"].clone()
    };
    assert_eq!([check().await, check().await, check().await], [json!(true), json!(true), json!(false)]);
    assert_eq!((send(&client, "alice").await, send(&client, "alice").await), (200, 429));
    let alice = key("alice").await;
    let quota = &alice["quota"];
    assert_eq!(
        (&quota["allowed"], &quota["remaining"], &quota["limit"]),
        (&json!(false), &json!(0), &json!(1))
    );
    assert!(quota["explanation"].as_str().unwrap().starts_with("Denied until "), "{quota}");
    let of = |name: &str| {
        alice["policies"].as_array().unwrap().iter().find(|one| one["policy"] == name).unwrap().clone()
    };
    let (login, search) = (of("login"), of("search"));
    assert_eq!((&login["allowed"], &login["remaining"]), (&json!(false), &json!(0)));
    assert!(login["explanation"].as_str().unwrap().contains("no room for 1"), "{login}");
    assert_eq!((&search["allowed"], &search["remaining"]), (&json!(true), &json!(2)), "each is asked alone");
    let names: Vec<&str> = alice["remembered"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["limitName"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["quota", "login"], "the last decision first");
    let last = &alice["remembered"][0]["lastDenial"];
    assert_eq!((&last["limit"], &last["remaining"]), (&json!(1), &json!(0)));
    assert_eq!(key("alice").await["policies"], alice["policies"], "looking spends nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_are_near_a_limit_are_listed_by_how_near_they_are() {
    let server = Running::start(Store::Embedded).await;
    let (client, operator) = (server.client(), server.operator());
    let near = async |query: &str| -> Vec<(String, u64)> {
        let listed = operator.get(&format!("/admin/near-limits{query}")).await.unwrap().json();
        let items = listed["items"].as_array().unwrap().clone();
        items
            .iter()
            .map(|one| (one["key"].as_str().unwrap().to_owned(), one["remaining"].as_u64().unwrap()))
            .collect()
    };
    for (user, sends) in [("a", 1), ("b", 3), ("c", 4)] {
        configure(&client, user, 4, 60).await;
        for _ in 0..sends {
            assert_eq!(send(&client, user).await, 200);
        }
    }
    let listed = [("c".to_owned(), 0), ("b".to_owned(), 1)];
    assert_eq!(near("").await, listed, "a has used less than half");
    assert_eq!(near("?limit=1").await, listed[..1]);
    assert_eq!(near("?limitName=quota&capability=quota").await, listed);
    assert_eq!(near("?limitName=login").await, []);
    assert_eq!(operator.get("/admin/near-limits?limit=0").await.unwrap().status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_has_a_strict_policy_and_its_own_assets() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    let page = client.get("/").await.unwrap();
    assert_eq!((page.status, page.header("cache-control")), (200, Some("no-cache")));
    let policy = page.header("content-security-policy").unwrap().to_owned();
    let html = String::from_utf8(page.body.to_vec()).unwrap();
    let assets: Vec<&str> =
        html.split("\"./assets/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    // A binary that was built without the pages has another one, which contains its script.
    assert_eq!(policy.contains("unsafe-inline"), assets.is_empty(), "{policy}");
    for asset in assets {
        let asset = client.get(&format!("/assets/{asset}")).await.unwrap();
        assert_eq!(asset.status, 200);
        assert!(asset.header("cache-control").unwrap().contains("immutable"));
    }
    for path in ["/assets/nothing.js", "/assets/..%2findex.html"] {
        assert_eq!(client.get(path).await.unwrap().status, 404, "{path}");
    }
    let head = client.request(Method::HEAD, "/", &[], "").await.unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
}

/// A Prometheus that scrapes these servers each second, and ends with the test.
struct Prometheus {
    child: std::process::Child,
    _directory: tempfile::TempDir,
}

impl Prometheus {
    fn start(port: u16, servers: &[&Weir]) -> Self {
        let promtool = weir_testkit::promtool().unwrap_or_else(|why| {
            panic!(
                "cannot find Prometheus: {why}. Install Debian's package, or set WEIR_TEST_SKIP=prometheus"
            )
        });
        let directory = tempfile::tempdir().unwrap();
        let targets: Vec<String> = servers.iter().map(|weir| format!("'{}'", weir.addr())).collect();
        let file = directory.path().join("prometheus.yml");
        let scrape = format!(
            "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: weir\n  static_configs: [{{targets: [{}]}}]\n",
            targets.join(", ")
        );
        std::fs::write(&file, scrape).unwrap();
        let child = std::process::Command::new(promtool.with_file_name("prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Self { child, _directory: directory }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_servers_are_shown_as_prometheus_has_them() {
    if weir_testkit::skip("prometheus") {
        return;
    }
    let port = weir_testkit::ports::unused();
    let url = format!("http://127.0.0.1:{port}");
    let known = Running::start_with(Store::Embedded, &[("WEIR_CONSOLE_PROMETHEUS", &url)]).await;
    let other = Running::start(Store::Embedded).await;
    let operator = known.operator();
    assert_eq!(other.operator().get("/admin/servers").await.unwrap().status, 404, "it knows itself alone");
    assert_eq!(operator.get("/admin/servers").await.unwrap().status, 503, "Prometheus does not run yet");
    assert_eq!(operator.get("/admin/servers?range=7d").await.unwrap().status, 400);
    let _prometheus = Prometheus::start(port, &[&known.weir, &other.weir]);
    for server in [&known, &other] {
        configure(&server.client(), "u", 1_000_000, 60).await;
    }
    // Prometheus needs two scrapes with different counts for a rate.
    let mut seen = Value::Null;
    wait::until("both servers have a rate", TEST_TIMEOUT * 2, async || {
        for server in [&known, &other] {
            assert_eq!(send(&server.client(), "u").await, 200);
        }
        let answer = operator.get("/admin/servers").await.unwrap();
        seen = if answer.status == 200 { answer.json() } else { Value::Null };
        let servers = seen["servers"].as_array();
        let has_rate = |one: &Value| one["allowed"].as_f64().is_some_and(|rate| rate > 0.0);
        servers.is_some_and(|all| all.len() == 2 && all.iter().all(has_rate))
            && seen["series"]["quota.allowed"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| !one.is_null()))
    })
    .await;
    let mut instances = [known.weir.addr().to_string(), other.weir.addr().to_string()];
    instances.sort();
    let listed: Vec<&Value> =
        seen["servers"].as_array().unwrap().iter().map(|one| &one["instance"]).collect();
    assert_eq!(json!(listed), json!(instances));
    assert_eq!(seen["servers"][0]["enginesDown"], json!([]));
    let (times, series) = (seen["times"].as_array().unwrap().len(), &seen["series"]);
    assert!(series.as_object().unwrap().values().all(|column| column.as_array().unwrap().len() == times));
    assert!(series.get("tier.allowed").is_some(), "two counters are one series: {series}");
}

on_each_engine!(a_key_shows_every_limit_and_why_it_was_denied);
