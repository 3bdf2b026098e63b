//! Sale behind Debian's nginx, set up as `deploy/nginx.conf` says.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

use futures_util::future::join_all;
use serde_json::json;
use tempfile::TempDir;
use weir_testkit::http::Client;
use weir_testkit::process::Weir;
use weir_testkit::{skip, wait};

use super::fixtures::{Listener, UNTHROTTLED, buy, create_active, status};
use crate::fixtures::{Running, Store, TEST_TIMEOUT};

const CONFIGURATION: &str = include_str!("../../../../../deploy/nginx.conf");
const TRUSTED: (&str, &str) = ("WEIR_EDGE_TRUSTED_PROXIES", "127.0.0.1");

struct Nginx {
    child: Child,
    address: SocketAddr,
    _directory: TempDir,
}

impl Nginx {
    /// Starts nginx in front of a server, with the shipped file except for ports, paths and logs.
    async fn start(weir: &Weir) -> Self {
        Self::start_with(weir, "192.0.2.0/24 1;").await
    }

    /// Adds known networks.
    async fn start_with(weir: &Weir, known: &str) -> Self {
        let program = weir_testkit::nginx().expect("nginx");
        let directory = tempfile::tempdir().expect("a directory");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, weir_testkit::ports::unused()));
        let temporary = directory.path().display();
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("    {name}_temp_path {temporary}/{name};\n"))
            .concat();
        let changes = [
            ("listen 80;", format!("listen {address};")),
            ("server 127.0.0.1:8080;", format!("server {};", weir.addr())),
            ("/var/cache/nginx/weir", format!("{temporary}/cache")),
            ("    access_log /var/log/nginx/access.log calls;", format!("    access_log off;\n{paths}")),
            ("192.0.2.0/24 1;", known.to_owned()),
        ];
        let mut text = format!("daemon off;\nuser root;\npid {temporary}/nginx.pid;\n{CONFIGURATION}");
        for (shipped, here) in changes {
            assert_eq!(text.matches(shipped).count(), 1, "the file says {shipped:?} once");
            text = text.replace(shipped, &here);
        }
        let file = directory.path().join("nginx.conf");
        std::fs::write(&file, text).expect("it is written");
        let mut command = Command::new(program);
        command.arg("-p").arg(directory.path()).arg("-c").arg(&file);
        command.arg("-e").arg(directory.path().join("error.log")).stdin(Stdio::null());
        let child = command.spawn().expect("nginx starts");
        let nginx = Self { child, address, _directory: directory };
        let client = nginx.client();
        wait::until("nginx answers", TEST_TIMEOUT, async || client.get("/livez").await.is_ok()).await;
        nginx
    }

    fn client(&self) -> Client {
        // nginx refuses some calls itself, with responses that the API's contract does not have.
        Client::new(format!("http://{}", self.address)).unchecked()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // The master process stops its workers on SIGTERM, but not when it is killed.
        let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_and_events_pass_through_nginx_without_delay() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED, UNTHROTTLED]).await;
    let nginx = Nginx::start(&running.weir).await;
    create_active(&running.operator(), "W", 2).await;
    let mut listener = Listener::connect(nginx.address, "?sku=W", None).await;
    assert_eq!(listener.next().await.unwrap().data["stock"], 2);
    assert!(buy(&nginx.client(), "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data, json!({"sku": "W", "stock": 1}));
    assert_eq!(buy(&nginx.client(), "W", "a").await, Err("ALREADY_PURCHASED".to_owned()));
    assert!(buy(&nginx.client(), "W", "b").await.is_ok());
    assert_eq!(listener.until("state-change").await.data["reason"], "SOLD_OUT");
    let client = nginx.client();
    wait::until("the status is no older than a second", TEST_TIMEOUT, async || {
        status(&client, "W").await["stock"] == 0
    })
    .await;
    for path in [
        "/admin/audit",
        "/metrics",
        "/api/config/u",
        "/api/v1/slots/windows",
        "/api/v1/products",
        "/v1/requests",
        "/docs",
    ] {
        assert_eq!(client.get(path).await.unwrap().status, 404, "{path} is not reachable from outside");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_each_sale_is_cached_for_a_second() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED]).await;
    let nginx = Nginx::start(&running.weir).await;
    create_active(&running.operator(), "W", 2).await;
    create_active(&running.operator(), "X", 7).await;
    let client = nginx.client();
    wait::until("a response comes from the cache", TEST_TIMEOUT, async || {
        let answers = join_all((0..5).map(|_| client.get("/api/v1/sales?sku=W"))).await;
        answers.into_iter().any(|answer| answer.unwrap().header("x-cache-status") == Some("HIT"))
    })
    .await;
    assert_eq!(status(&client, "X").await["stock"], 7, "another sale has a cache entry of its own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_may_have_five_streams() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED]).await;
    let nginx = Nginx::start(&running.weir).await;
    create_active(&running.operator(), "W", 2).await;
    let mut streams = Vec::new();
    for _ in 0..5 {
        let stream = Listener::connect(nginx.address, "", None).await;
        assert_eq!(stream.status(), "200");
        streams.push(stream);
    }
    let sixth = Listener::connect(nginx.address, "", None).await;
    assert_eq!(sixth.status(), "429");
    assert!(sixth.head.iter().any(|line| line.eq_ignore_ascii_case("retry-after: 1")), "{:?}", sixth.head);
    streams.pop();
    wait::until("a closed stream has made room", TEST_TIMEOUT, async || {
        Listener::connect(nginx.address, "", None).await.status() == "200"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_of_a_known_network_has_more() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED]).await;
    let nginx = Nginx::start_with(&running.weir, "127.0.0.0/8 1;").await;
    create_active(&running.operator(), "W", 2).await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        let stream = Listener::connect(nginx.address, "", None).await;
        assert_eq!(stream.status(), "200");
        streams.push(stream);
    }
    let client = nginx.client();
    let answers = join_all((0..300).map(|_| client.get("/livez"))).await;
    assert!(answers.into_iter().all(|answer| answer.unwrap().status == 200), "a burst of 500 is allowed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_ids_and_traces_are_passed_on() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED, ("WEIR_SALE_LOG_ATTEMPTS", "true")]).await;
    let nginx = Nginx::start(&running.weir).await;
    create_active(&running.operator(), "W", 2).await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let traceparent = format!("00-{trace}-00f067aa0ba902b7-01");
    let call = async |buyer: &str, more: &[(&str, &str)]| {
        let headers = [&[("content-type", "application/json"), ("x-user-id", buyer)], more].concat();
        let body = json!({"sku": "W", "qty": 1}).to_string();
        let method = http::Method::POST;
        nginx.client().request(method, "/api/v1/purchases", &headers, body).await.unwrap()
    };
    let own = call("ada", &[("x-request-id", "order-17"), ("traceparent", &traceparent)]).await;
    assert_eq!(own.header("x-request-id"), Some("order-17"));
    let line = running.weir.wait_for_log(|line| line.contains("\"order-17\""), TEST_TIMEOUT).await;
    assert!(line.contains(trace) && line.contains("\"address\":\"127.0.0.1\""), "{line}");
    let made = call("bob", &[]).await;
    let id = made.header("x-request-id").unwrap().to_owned();
    assert!(id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit()), "nginx makes {id}");
    running.weir.wait_for_log(|line| line.contains(&id), TEST_TIMEOUT).await;
    let client = nginx.client();
    wait::until("a response from the cache has the id of its own call", TEST_TIMEOUT, async || {
        let mut hits = 0;
        for id in ["one", "two", "three"] {
            let headers = [("x-request-id", id)];
            let path = "/api/v1/sales?sku=W";
            let answer = client.request(http::Method::GET, path, &headers, "").await.unwrap();
            assert_eq!((answer.status, answer.header("x-request-id")), (200, Some(id)));
            hits += usize::from(answer.header("x-cache-status") == Some("HIT"));
        }
        hits > 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_from_one_address_is_refused_with_the_apis_error_for_a_while() {
    if skip("nginx") {
        return;
    }
    let running = Running::start_with(Store::Embedded, &[TRUSTED]).await;
    let nginx = Nginx::start(&running.weir).await;
    create_active(&running.operator(), "W", 2).await;
    let client = nginx.client();
    let mut refused = None;
    wait::until("calls above 100 a second are refused", TEST_TIMEOUT, async || {
        let answers = join_all((0..300).map(|_| client.get("/livez"))).await;
        refused = answers.into_iter().map(Result::unwrap).find(|answer| answer.status == 429);
        refused.is_some()
    })
    .await;
    let refused = refused.unwrap();
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.header("content-type"), Some("application/json"));
    let error = json!({
        "code": "RATE_LIMITED", "message": "Too many requests. Please try again shortly.", "retryAfter": 1,
    });
    assert_eq!(refused.json(), json!({"success": false, "error": error}), "the same body as Weir's own");
    wait::until("calls are admitted again", TEST_TIMEOUT, async || {
        client.get("/livez").await.unwrap().status == 200
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_host_that_nginx_passes_on_has_to_be_allowed() {
    if skip("nginx") {
        return;
    }
    let settings = [TRUSTED, ("WEIR_HTTP_ALLOWED_HOSTS", "shop.example.com")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let nginx = Nginx::start(&running.weir).await;
    for (host, status) in [("shop.example.com", 200), ("evil.example", 400)] {
        let headers = [("host", host)];
        let answer = nginx.client().request(http::Method::GET, "/livez", &headers, "").await.unwrap();
        assert_eq!(answer.status, status, "{host}: {:?}", answer.body);
    }
}
