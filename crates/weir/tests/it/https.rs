//! TLS on the listeners: versions and protocols, certificates that change, callers' certificates, and callers that are slow,
//! leave, or do not speak TLS.

mod fixtures;

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Body;
use hyper_util::rt::TokioIo;
use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use weir_server::auth::jwt::{self, Claims};
use weir_server::routes::routes;
use weir_testkit::certificates::Authority;
use weir_testkit::process::Weir;
use weir_testkit::raw_connection::Listener;
use weir_testkit::{http as plain, wait};

use self::fixtures::{Caller, Connection, Files, HTTP_1, HTTP_2, read_until, run_weir};
use crate::fixtures::{FAR_FUTURE, TEST_TIMEOUT};

/// The first bytes of a handshake that does not go on.
const HALF_HANDSHAKE: [u8; 6] = [22, 3, 1, 2, 0, 1];
/// Each version of TLS alone.
static VERSIONS: [&[&SupportedProtocolVersion]; 2] = [&[&TLS12], &[&TLS13]];

fn json_request(method: &str, path: &str, key: &str, body: &serde_json::Value) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path);
    let request = request.header("content-type", "application/json").header("x-admin-key", key);
    request.body(Full::new(body.to_string().into())).unwrap()
}

/// Creates a product whose sale is active once this returns.
async fn create_active(connection: &mut Connection, weir: &Weir, stock: u32) {
    let at = |seconds: i64| {
        let at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
        at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
    };
    let product = json!({
        "sku": "W", "productName": "Widget", "initialStock": stock, "startTime": at(2), "endTime": at(3_600),
    });
    let request = json_request("POST", "/api/v1/products", &weir.admin_key(), &product);
    assert_eq!(connection.send(request).await.unwrap().status(), StatusCode::CREATED);
    let mut sharing = connection.share();
    wait::until("the sale is active", TEST_TIMEOUT, async || {
        let response = sharing.get("/api/v1/sales?sku=W").await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8_lossy(&body).contains("ACTIVE")
    })
    .await;
}

async fn buy(connection: &mut Connection, buyer: &str) -> StatusCode {
    let mut request = json_request("POST", "/api/v1/purchases", "", &json!({"sku": "W", "qty": 1}));
    request.headers_mut().insert("x-user-id", buyer.parse().unwrap());
    connection.send(request).await.unwrap().status()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_1_2_and_1_3_carry_http_2_and_http_1() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    assert!(weir.base_url().starts_with("https://"));
    for versions in VERSIONS {
        let version = versions[0].version;
        for (offered, chosen) in [
            (&[HTTP_2, HTTP_1][..], Some(HTTP_2)),
            (&[HTTP_1, HTTP_2], Some(HTTP_2)),
            (&[HTTP_1], Some(HTTP_1)),
            (&[], None),
        ] {
            let caller = files.caller().with_versions(versions).offering(offered);
            let stream = caller.connect(weir.addr()).await.unwrap();
            let session = stream.get_ref().1;
            assert_eq!(session.protocol_version(), Some(version));
            assert_eq!(session.alpn_protocol(), chosen.map(str::as_bytes), "{offered:?}");
            let mut connection = caller.open(weir.addr()).await.unwrap();
            for _ in 0..3 {
                let response = connection.get("/livez").await.unwrap();
                assert_eq!(response.status(), StatusCode::OK);
                assert!(response.headers().contains_key("x-request-id"));
                response.into_body().collect().await.unwrap();
            }
        }
    }
    let unknown = files.caller().offering(&["spdy/3"]).connect(weir.addr()).await;
    assert!(unknown.is_err(), "no protocol in common");
    let stranger = Caller::trusting(&Authority::generate()).connect(weir.addr()).await;
    assert!(stranger.is_err(), "the caller does not trust the authority");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_one_http_2_connection_are_answered_side_by_side() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let mut connection = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    let config = json!({"userId": "u", "rateLimit": 50, "timeWindow": 60});
    let configured = connection.send(json_request("POST", "/api/config", "", &config)).await.unwrap();
    assert_eq!(configured.status(), StatusCode::OK);
    let sends = (0..80).map(|n| {
        let mut connection = connection.share();
        async move {
            let message = json!({"userId": "u", "message": format!("m{n}")});
            connection.send(json_request("POST", "/api/send", "", &message)).await.unwrap().status()
        }
    });
    let statuses = join_all(sends).await;
    let count = |status| statuses.iter().filter(|other| **other == status).count();
    assert_eq!((count(StatusCode::OK), count(StatusCode::TOO_MANY_REQUESTS)), (50, 30));
    // What HTTP/1.1 refuses is refused here: a name that is not this machine's, a body that is too large, a long path.
    let Connection::Http2(sender) = &mut connection else { panic!("HTTP/2 was chosen") };
    let mut elsewhere = async |uri: &str, body: Bytes| {
        let request = Request::post(uri).header("content-type", "application/json");
        sender.send_request(request.body(Full::new(body)).unwrap()).await.unwrap().status()
    };
    assert_eq!(elsewhere("https://evil.example/api/send", Bytes::new()).await, StatusCode::BAD_REQUEST);
    let large = Bytes::from(vec![b' '; (1 << 20) + 1]);
    assert_eq!(elsewhere("https://localhost/api/send", large).await, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(elsewhere("https://localhost/nowhere", Bytes::new()).await, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_http_2_connections_count_as_connections_and_leave_probes_their_reserve() {
    let files = Files::new();
    let weir = files.server().env("WEIR_HTTP_MAX_CONNECTIONS", "5").env("WEIR_HTTP_MAX_STREAMS", "4");
    let weir = weir.spawn().await;
    let mut connection = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    create_active(&mut connection, &weir, 1).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let response = connection.get("/api/v1/sales/events").await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        streams.push(response);
    }
    let refused = connection.get("/api/v1/sales?sku=W").await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(connection.get("/livez").await.unwrap().status(), StatusCode::OK);
    assert_eq!(files.caller().get(&weir, "/livez").await, Ok(200), "another connection is in the reserve");
    streams.pop();
    wait::until("a cancelled stream gives its permit back", TEST_TIMEOUT, async || {
        connection.get("/api/v1/sales?sku=W").await.unwrap().status() == StatusCode::OK
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_take_nothing_of_their_responses_leave_probes_their_reserve() {
    let files = Files::new();
    let weir = files.server().env("WEIR_HTTP_MAX_CONNECTIONS", "5").env("WEIR_HTTP_MAX_STREAMS", "4");
    let weir = weir.spawn().await;
    let mut hostile = files.caller().offering(&[HTTP_2]).with_window(0).open(weir.addr()).await.unwrap();
    // The connection has the fifth permit.
    let (ordinary, reserve) = (4, 4);
    let started = Instant::now();
    let mut answered = Vec::new();
    for _ in 0..ordinary + reserve {
        answered.push(hostile.get("/livez").await.unwrap());
    }
    let head = Request::head("/api/v1/sales").body(Full::default()).unwrap();
    let refused = hostile.send(head).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.body().is_end_stream());
    while answered.len() < 90 {
        answered.push(hostile.get("/livez").await.unwrap());
    }
    let accepted = answered.iter().filter(|response| response.status() == StatusCode::OK).count();
    // A permit of the reserve is free again after five seconds.
    let turns = usize::try_from(started.elapsed().as_secs() / 5).unwrap() + 1;
    assert!((ordinary + reserve..=ordinary + reserve * turns).contains(&accepted), "{accepted}");
    let in_reserve = answered.drain(ordinary..ordinary + reserve);
    let ends = in_reserve.map(|response| response.into_body().collect());
    let ends = tokio::spawn(join_all(ends.collect::<Vec<_>>()));
    while !ends.is_finished() {
        assert_eq!(files.caller().get(&weir, "/livez").await, Ok(200));
    }
    assert!(ends.await.unwrap().iter().all(Result::is_err), "they are reset");
    wait::until("other requests may use the reserve", TEST_TIMEOUT, async || {
        hostile.get("/livez").await.unwrap().status() == StatusCode::OK
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_counts_as_a_connection_until_all_of_it_is_taken() {
    let files = Files::new();
    let weir = files.server().env("WEIR_HTTP_MAX_CONNECTIONS", "50").env("WEIR_HTTP_MAX_STREAMS", "4");
    let weir = weir.spawn().await;
    let mut connection = files.caller().offering(&[HTTP_2]).with_window(1).open(weir.addr()).await.unwrap();
    let mut responses = Vec::new();
    for _ in 0..60 {
        responses.push(connection.get("/openapi.json").await.unwrap());
    }
    let (taken, refused) = responses.split_at(49);
    assert!(taken.iter().all(|response| response.status() == StatusCode::OK));
    assert!(refused.iter().all(|response| response.status() == StatusCode::SERVICE_UNAVAILABLE));
    // The end of a small response is sent with it. It holds no permit of the reserve until the rest is taken.
    let mut small = Vec::new();
    for _ in 0..20 {
        small.push(connection.get("/livez").await.unwrap());
    }
    assert!(small.iter().all(|response| response.status() == StatusCode::OK));
    responses.truncate(48);
    wait::until("a cancelled response gives its permit back", TEST_TIMEOUT, async || {
        connection.get("/openapi.json").await.unwrap().status() == StatusCode::OK
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_without_tls_is_told_to_use_it() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let answer = plain::raw(weir.addr(), b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.contains("https://") && answer.contains("INVALID_REQUEST"), "{answer}");
    // What begins like a handshake and is none is answered with an alert, and the connection ends.
    let answer = plain::raw(weir.addr(), &[22, 3, 1, 0, 4, 1, 0, 0, 0]).await;
    assert_eq!(answer.first(), Some(&21), "{answer:?}");
    assert_eq!(files.caller().get(&weir, "/livez").await, Ok(200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_is_taken_up_and_a_broken_one_is_not() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let mut open = files.caller().offering(&[HTTP_1]).open(weir.addr()).await.unwrap();
    let mut multiplexed = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    let mut events = multiplexed.get("/api/v1/sales/events").await.unwrap();
    assert_eq!(events.status(), StatusCode::NOT_FOUND, "there is no sale yet");
    create_active(&mut multiplexed, &weir, 3).await;
    events = multiplexed.get("/api/v1/sales/events").await.unwrap();
    let live = async |open: &mut Connection| {
        let response = open.get("/livez").await.unwrap();
        response.into_body().collect().await.unwrap();
    };
    live(&mut open).await;

    let other = Authority::generate();
    files.write(&other.issue(&["localhost"]));
    let new = Caller::trusting(&other);
    wait::until("the new certificate is served", TEST_TIMEOUT, async || {
        // The open connection has requests meanwhile, so it is not closed for being idle.
        live(&mut open).await;
        new.get(&weir, "/livez").await.is_ok()
    })
    .await;
    assert!(files.caller().connect(weir.addr()).await.is_err(), "the old certificate is no longer served");
    live(&mut open).await;
    assert_eq!(buy(&mut multiplexed, "a").await, StatusCode::OK);
    read_until(events.body_mut(), "stock-update").await;

    std::fs::write(files.path("key.pem"), files.authority.issue(&["localhost"]).key).unwrap();
    let refused = |line: &str| line.contains("are not used") && line.contains("http.tls.key");
    let line = weir.wait_for_log(refused, TEST_TIMEOUT).await;
    assert!(line.contains("key.pem") && line.contains("is not the key of the certificate"), "{line}");
    assert_eq!(new.get(&weir, "/livez").await, Ok(200), "the pair before is still served");
    std::fs::remove_file(files.path("cert.pem")).unwrap();
    let missing = |line: &str| line.contains("are not used") && line.contains("http.tls.cert");
    weir.wait_for_log(missing, TEST_TIMEOUT).await;
    assert_eq!(new.get(&weir, "/livez").await, Ok(200));

    files.write(&files.authority.issue(&["localhost"]));
    wait::until("the mended pair is served", TEST_TIMEOUT, async || {
        files.caller().get(&weir, "/livez").await.is_ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_client_ca_callers_need_a_certificate() {
    let files = Files::new();
    let callers = Authority::generate();
    std::fs::write(files.path("client-ca.pem"), callers.pem()).unwrap();
    let weir = files.server().env("WEIR_TLS_CLIENT_CA", files.path("client-ca.pem")).spawn().await;
    for versions in VERSIONS {
        let caller = files.caller().with_versions(versions);
        assert!(caller.get(&weir, "/livez").await.is_err(), "without a certificate");
        let stranger = caller.clone().presenting(Authority::generate().issue(&["stranger"]));
        assert!(stranger.get(&weir, "/livez").await.is_err(), "of another authority");
        for protocols in [&[HTTP_1][..], &[HTTP_2]] {
            let known = caller.clone().presenting(callers.issue(&["known"])).offering(protocols);
            assert_eq!(known.get(&weir, "/livez").await, Ok(200));
        }
        assert!(health(&weir, &caller).await.is_err(), "gRPC requires it as well");
        let known = caller.presenting(callers.issue(&["known"]));
        assert_eq!(health(&weir, &known).await, Ok(ServingStatus::Serving));
    }
    // `weir health` presents the server's own certificate unless it is given another.
    let environment = [
        ("WEIR_TLS_CERT", files.path("cert.pem")),
        ("WEIR_TLS_KEY", files.path("key.pem")),
        ("WEIR_TLS_CLIENT_CA", files.path("client-ca.pem")),
    ];
    let environment: Vec<(&str, &Path)> =
        environment.iter().map(|(name, path)| (*name, path.as_path())).collect();
    let address = weir.addr().to_string();
    let (code, _, errors) = run_weir(&["health", "--listen", &address], &environment).await;
    assert_eq!(code, Some(1), "{errors}");
    let mine = callers.issue(&["mine"]);
    std::fs::write(files.path("my.pem"), &mine.certificate).unwrap();
    std::fs::write(files.path("my.key"), &mine.key).unwrap();
    let [cert, key] = ["my.pem", "my.key"].map(|name| files.path(name).to_str().unwrap().to_owned());
    let arguments = ["health", "--listen", &address, "--cert", &cert, "--key", &key];
    let (code, output, errors) = run_weir(&arguments, &environment).await;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("ready on"), "{output}");
}

/// Asks for the health of gRPC over TLS.
async fn health(weir: &Weir, caller: &Caller) -> Result<ServingStatus, String> {
    let (address, caller) = (weir.grpc_addr(), caller.clone().offering(&[HTTP_2]));
    let connector = tower::service_fn(move |_: http::Uri| {
        let caller = caller.clone();
        async move { caller.connect(address).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost").timeout(TEST_TIMEOUT);
    let channel: Channel = endpoint.connect_with_connector_lazy(connector);
    let checked = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
    checked.map(|checked| checked.into_inner().status()).map_err(|status| status.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_is_served_over_tls_alone() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    assert_eq!(health(&weir, &files.caller()).await, Ok(ServingStatus::Serving));
    let endpoint = Endpoint::from_shared(format!("http://{}", weir.grpc_addr())).unwrap();
    let plain = endpoint.timeout(TEST_TIMEOUT).connect_lazy();
    assert!(HealthClient::new(plain).check(HealthCheckRequest::default()).await.is_err());
    let http1 = files.caller().offering(&[HTTP_1]).connect(weir.grpc_addr()).await;
    assert!(http1.is_err(), "gRPC is HTTP/2");
    // Handshakes that do not go on hold up nobody, and end.
    let mut silent = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(weir.grpc_addr()).await.unwrap();
        stream.write_all(&HALF_HANDSHAKE).await.unwrap();
        silent.push(stream);
    }
    assert_eq!(health(&weir, &files.caller()).await, Ok(ServingStatus::Serving));
    for mut stream in silent {
        expect_end(&mut stream).await;
    }
}

/// Waits until the server has ended a connection.
async fn expect_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let reading = stream.read_to_end(&mut rest);
    // A reset ends it as well.
    let _ = tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("the server ends the connection");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_be_used_stop_the_start_with_the_setting_and_the_file() {
    let files = Files::new();
    let other = Authority::generate().issue(&["localhost"]);
    for (name, content) in [
        ("other.key", other.key.as_bytes()),
        ("nonsense.pem", b"nonsense"),
        ("broken.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
    ] {
        std::fs::write(files.path(name), content).unwrap();
    }
    let (cert, key) = (Some("cert.pem"), Some("key.pem"));
    for (cert, key, client_ca, parts) in [
        (cert, None, None, ["http.tls.cert", "http.tls.key"]),
        (None, key, None, ["http.tls.key", "http.tls.cert"]),
        (None, None, Some("cert.pem"), ["http.tls.client_ca", "http.tls.cert"]),
        (Some("absent.pem"), key, None, ["http.tls.cert", "absent.pem"]),
        (Some("."), key, None, ["http.tls.cert", "is not a file"]),
        (Some("nonsense.pem"), key, None, ["http.tls.cert", "nonsense.pem"]),
        (Some("broken.pem"), key, None, ["http.tls.cert", "broken.pem"]),
        (Some("key.pem"), key, None, ["http.tls.cert", "key.pem"]),
        (cert, Some("absent.pem"), None, ["http.tls.key", "absent.pem"]),
        (cert, Some("cert.pem"), None, ["http.tls.key", "no unencrypted private key"]),
        (cert, Some("other.key"), None, ["http.tls.key", "other.key"]),
        (cert, key, Some("nonsense.pem"), ["http.tls.client_ca", "nonsense.pem"]),
    ] {
        let data = tempfile::tempdir().unwrap();
        let mut environment = vec![("WEIR_DATA", data.path().to_owned())];
        for (name, file) in
            [("WEIR_TLS_CERT", cert), ("WEIR_TLS_KEY", key), ("WEIR_TLS_CLIENT_CA", client_ca)]
        {
            environment.extend(file.map(|file| (name, files.path(file))));
        }
        let environment: Vec<(&str, &Path)> =
            environment.iter().map(|(name, path)| (*name, path.as_path())).collect();
        let arguments = ["serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"];
        let (code, _, errors) = run_weir(&arguments, &environment).await;
        assert_eq!(code, Some(2), "{errors}");
        assert_eq!(errors.trim_end().lines().count(), 1, "{errors}");
        assert!(parts.iter().all(|part| errors.contains(part)), "{errors} lacks one of {parts:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_do_not_go_on_hold_up_nobody_and_end() {
    let files = Files::new();
    let weir = files.server().env("WEIR_HTTP_MAX_CONNECTIONS", "8").env("WEIR_HTTP_READ_TIMEOUT", "3s");
    let weir = weir.spawn().await;
    let mut silent = Vec::new();
    for n in 0..8 {
        let mut stream = TcpStream::connect(weir.addr()).await.unwrap();
        // Some say nothing at all.
        stream.write_all(&HALF_HANDSHAKE[..n % 3]).await.unwrap();
        silent.push(stream);
    }
    assert_eq!(files.caller().get(&weir, "/livez").await, Ok(200), "probes have their reserve");
    for stream in &mut silent {
        expect_end(stream).await;
    }
    assert_eq!(files.caller().get(&weir, "/api/v1/sales").await, Ok(404), "their permits are free");
    let mut open = files.caller().offering(&[HTTP_2]).connect(weir.addr()).await.unwrap();
    let ended = tokio::time::timeout(TEST_TIMEOUT, open.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "an HTTP/2 connection without requests is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_streams_are_served_over_tls() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let mut buyers = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    create_active(&mut buyers, &weir, 5).await;
    let mut bodies = Vec::new();
    for protocols in [&[HTTP_1][..], &[HTTP_2]] {
        let mut connection = files.caller().offering(protocols).open(weir.addr()).await.unwrap();
        let response = connection.get("/api/v1/sales/events").await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut body = response.into_body();
        read_until(&mut body, "event: initial").await;
        bodies.push((connection, body));
    }
    assert_eq!(buy(&mut buyers, "a").await, StatusCode::OK);
    for (_, body) in &mut bodies {
        assert!(read_until(body, "event: stock-update").await.contains(r#""stock":4"#));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_is_answered_without_a_body_on_http_2() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let mut connection = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    create_active(&mut connection, &weir, 5).await;
    let key = weir.admin_key();
    for route in routes().iter().filter(|route| route.method.as_ref().is_none_or(|m| m == Method::GET)) {
        let path = route.path.replace(['{', '}', '*'], "");
        let head = Request::head(&path).header("x-admin-key", &key).body(Full::default()).unwrap();
        let response = connection.send(head).await.unwrap();
        assert!(response.body().is_end_stream(), "HEAD {path} has a body");
    }
    for path in ["/livez", "/openapi.json", "/docs"] {
        let head = Request::head(path).body(Full::default()).unwrap();
        let length = connection.send(head).await.unwrap().headers()["content-length"].clone();
        let body = connection.get(path).await.unwrap().into_body().collect().await.unwrap().to_bytes();
        assert_eq!(length, body.len().to_string(), "{path}");
    }
}

/// A server whose AI calls go to the test, and a token for one of its users.
async fn gateway(files: &Files) -> (Weir, Listener, String) {
    let upstream = Listener::start().await;
    let weir = files.server().env("WEIR_AI_UPSTREAM", upstream.url()).spawn().await;
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims { sub: "a@b.c".into(), exp: FAR_FUTURE, tenant_id: None, scope: None };
    let token = format!("Bearer {}", jwt::sign(&secret, &claims).unwrap());
    (weir, upstream, token)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_ends_its_ai_call() {
    let files = Files::new();
    let (weir, mut upstream, token) = gateway(&files).await;
    for protocols in [&[HTTP_1][..], &[HTTP_2]] {
        for answers in [false, true] {
            let mut connection = files.caller().offering(protocols).open(weir.addr()).await.unwrap();
            let request = Request::get("/api/v1/ai/x").header("authorization", &token);
            let request = request.body(Full::default()).unwrap();
            let calling = tokio::spawn(async move {
                let response = connection.send(request).await.unwrap();
                (connection, response)
            });
            let mut call = upstream.next().await;
            let head = call.head().await;
            assert_eq!(head.get("x-forwarded-proto"), Some("https"));
            assert_eq!(head.get("x-forwarded-host"), Some("localhost"));
            if answers {
                call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n").await;
                let (connection, mut response) = calling.await.unwrap();
                read_until(response.body_mut(), "hello").await;
                drop((response, connection));
            } else {
                calling.abort();
            }
            assert_eq!(call.rest().await, b"", "the call to the upstream ends");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_passes_bytes_both_ways_over_tls() {
    let files = Files::new();
    let (weir, mut upstream, token) = gateway(&files).await;
    let mut caller = files.caller().connect(weir.addr()).await.unwrap();
    let head = format!(
        "GET /api/v1/ai/socket HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    );
    caller.write_all(head.as_bytes()).await.unwrap();
    let mut far = upstream.next().await;
    far.head().await;
    far.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n").await;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        assert!(caller.read_buf(&mut answer).await.unwrap() > 0);
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "));
    let large = vec![7; 1 << 20];
    let sent = large.clone();
    let reading = tokio::spawn(async move { (far.bytes(1 << 20).await, far) });
    caller.write_all(&sent).await.unwrap();
    caller.flush().await.unwrap();
    let (received, mut far) = reading.await.unwrap();
    assert!(received == large);
    far.send([1, 2, 3]).await;
    let mut three = [0; 3];
    caller.read_exact(&mut three).await.unwrap();
    assert_eq!(three, [1, 2, 3]);
    caller.shutdown().await.unwrap();
    assert_eq!(far.rest().await, b"");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_ends_handshakes_and_streams_and_answers_what_was_accepted() {
    let files = Files::new();
    let (mut weir, mut upstream, token) = gateway(&files).await;
    let mut half = TcpStream::connect(weir.addr()).await.unwrap();
    half.write_all(&HALF_HANDSHAKE).await.unwrap();
    let mut connection = files.caller().offering(&[HTTP_2]).open(weir.addr()).await.unwrap();
    create_active(&mut connection, &weir, 5).await;
    let mut http1 = files.caller().offering(&[HTTP_1]).open(weir.addr()).await.unwrap();
    let mut bodies = Vec::new();
    for connection in [&mut connection, &mut http1] {
        let mut body = connection.get("/api/v1/sales/events").await.unwrap().into_body();
        read_until(&mut body, "event: initial").await;
        bodies.push(body);
    }
    let request = Request::get("/api/v1/ai/x").header("authorization", &token);
    let mut calling = connection.share();
    let request = request.body(Full::default()).unwrap();
    let call = tokio::spawn(async move { calling.send(request).await.unwrap() });
    let mut upstream = upstream.next().await;
    upstream.head().await;
    weir.terminate();
    expect_end(&mut half).await;
    for mut body in bodies {
        while let Some(frame) = tokio::time::timeout(TEST_TIMEOUT, body.frame()).await.expect("it ends") {
            frame.expect("it ends in order");
        }
    }
    upstream.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    let response = call.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "ok");
    assert!(weir.wait(TEST_TIMEOUT).await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commands_reach_a_server_with_tls() {
    let files = Files::new();
    let weir = files.server().spawn().await;
    let (address, url) = (weir.addr().to_string(), format!("https://localhost:{}", weir.addr().port()));
    let [cert, key, ca] = ["cert.pem", "key.pem", "ca.pem"].map(|name| files.path(name));
    std::fs::write(&ca, files.authority.pem()).unwrap();
    let listen = Path::new(&address);
    let server =
        [("WEIR_TLS_CERT", cert.as_path()), ("WEIR_TLS_KEY", key.as_path()), ("WEIR_LISTEN", listen)];
    let (code, _, errors) = run_weir(&["health"], &server).await;
    assert_eq!(code, Some(0), "{errors}");
    let data = weir.data_dir().to_str().unwrap();
    let list = ["dlq", "list", "--data", data];
    let (code, output, errors) = run_weir(&list, &server).await;
    assert_eq!(code, Some(0), "{errors}");
    assert!(output.contains("0 dead letters"), "{output}");
    // A certificate that is not in the server's file gets no credentials.
    let other = Authority::generate().issue(&["localhost"]);
    let (other_cert, other_key) = (files.path("other.pem"), files.path("other.key"));
    std::fs::write(&other_cert, other.certificate).unwrap();
    std::fs::write(&other_key, other.key).unwrap();
    let stranger = [
        ("WEIR_TLS_CERT", other_cert.as_path()),
        ("WEIR_TLS_KEY", other_key.as_path()),
        ("WEIR_LISTEN", listen),
    ];
    let (code, _, errors) = run_weir(&list, &stranger).await;
    assert_eq!(code, Some(1), "{errors}");
    let by_url = ["dlq", "list", "--data", data, "--url", &url];
    let (code, _, errors) = run_weir(&by_url, &[]).await;
    assert_eq!(code, Some(1), "the system does not trust the authority: {errors}");
    let trusting = [&by_url[..], &["--ca", ca.to_str().unwrap()]].concat();
    let (code, _, errors) = run_weir(&trusting, &[]).await;
    assert_eq!(code, Some(0), "{errors}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_chain_of_a_caller_that_is_too_large_is_refused() {
    let files = Files::new();
    let callers = Authority::generate();
    std::fs::write(files.path("client-ca.pem"), callers.pem()).unwrap();
    let weir = files.server().env("WEIR_TLS_CLIENT_CA", files.path("client-ca.pem")).spawn().await;
    let names: Vec<String> = (0..500).map(|n| format!("name-{n}.a-long-domain.example")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut large = callers.issue(&names);
    large.certificate = large.certificate.repeat(10);
    let large = files.caller().presenting(large);
    assert!(large.get(&weir, "/livez").await.is_err());
    let small = files.caller().presenting(callers.issue(&["small"]));
    assert_eq!(small.get(&weir, "/livez").await, Ok(200));
    let ended = Duration::from_secs(20);
    wait::until("its connection has ended", ended, async || {
        let mut open = small.open(weir.addr()).await.unwrap();
        let metrics = open.get("/metrics").await.unwrap().into_body().collect().await.unwrap().to_bytes();
        String::from_utf8_lossy(&metrics).lines().any(|line| line == "weir_http_connections 1")
    })
    .await;
}
