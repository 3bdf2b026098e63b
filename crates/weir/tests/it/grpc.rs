//! Envoy's rate limit service over gRPC, called by tonic's client and by gRPC's Python library.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code as Fault, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_prost::ProstCodec;
use weir_server::auth::jwt::{self, Claims};
use weir_server::grpc::message::{
    Code, DescriptorStatus, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitResponse,
    RateLimitUnit,
};
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, InProcess, Running, Store, TEST_TIMEOUT, weir};

const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const POLICIES: &str = r#"
[policies.per_address]
kind = "fixed_window"
limit = 5
window = "PT1M"
[policies.per_address.match]
domain = "edge"
[policies.per_address.match.entries]
remote_address = "*"

[policies.login]
kind = "token_bucket"
capacity = 3
refill = 2
period = "PT1H"
[policies.login.match]
domain = "edge"
[policies.login.match.entries]
path = "/login"
remote_address = "*"

[policies.watched]
kind = "fixed_window"
limit = 1
window = "PT90S"
shadow = true
[policies.watched.match]
domain = "edge"
[policies.watched.match.entries]
watched = "*"
"#;

/// A settings file with [`POLICIES`].
fn file() -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(POLICIES.as_bytes()).unwrap();
    file
}

/// A client of the service, as Envoy is one.
#[derive(Clone)]
struct Proxy(Channel);

impl Proxy {
    fn connect(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        Self(endpoint.timeout(TEST_TIMEOUT).connect_lazy())
    }

    async fn send(&self, request: Request<RateLimitRequest>) -> Result<RateLimitResponse, Status> {
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        Ok(grpc.unary(request, METHOD.parse().unwrap(), codec).await?.into_inner())
    }

    async fn ask(&self, descriptors: &[RateLimitDescriptor]) -> RateLimitResponse {
        self.send(Request::new(question(descriptors))).await.unwrap()
    }
}

fn question(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest { domain: "edge".into(), descriptors: descriptors.to_vec(), hits_addend: 0 }
}

fn address(value: &str) -> RateLimitDescriptor {
    RateLimitDescriptor::new(&[("remote_address", value)])
}

/// The code, limit, unit and remaining amount of a descriptor.
fn summary(status: &DescriptorStatus) -> (Code, u32, RateLimitUnit, u32) {
    let limit = status.current_limit.as_ref().expect("a limit");
    (
        status.code(),
        limit.requests_per_unit,
        RateLimitUnit::try_from(limit.unit).unwrap(),
        status.limit_remaining,
    )
}

/// Starts a server with [`POLICIES`] and a manual clock.
async fn start() -> (InProcess, Proxy) {
    let file = file();
    let server = InProcess::start_with_file(Store::Embedded, &[], Some(file.path())).await;
    let proxy = Proxy::connect(server.grpc_address());
    (server, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statuses_have_code_limit_and_reset() {
    let (server, proxy) = start().await;
    for left in (0..5).rev() {
        let answer = proxy.ask(&[address("10.0.0.1")]).await;
        assert_eq!(answer.overall_code(), Code::Ok);
        assert_eq!(summary(&answer.statuses[0]), (Code::Ok, 5, RateLimitUnit::Minute, left));
        assert_eq!(answer.statuses[0].current_limit.as_ref().unwrap().name, "per_address");
        assert!(answer.response_headers_to_add.is_empty());
    }
    server.clock.advance(Duration::from_millis(20_500));
    let answer = proxy.ask(&[address("10.0.0.1")]).await;
    assert_eq!(answer.overall_code(), Code::OverLimit);
    assert_eq!(summary(&answer.statuses[0]), (Code::OverLimit, 5, RateLimitUnit::Minute, 0));
    let reset = answer.statuses[0].duration_until_reset.unwrap();
    assert_eq!((reset.seconds, reset.nanos), (39, 500_000_000));
    let [header] = &answer.response_headers_to_add[..] else { panic!("{answer:?}") };
    assert_eq!((header.key.as_str(), header.value.as_str()), ("retry-after", "40"));
    assert_eq!(proxy.ask(&[address("10.0.0.2")]).await.overall_code(), Code::Ok, "another key");
    server.clock.advance(Duration::from_millis(39_500));
    assert_eq!(proxy.ask(&[address("10.0.0.1")]).await.overall_code(), Code::Ok);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_descriptors_are_spent_or_none() {
    let (server, proxy) = start().await;
    let login = RateLimitDescriptor::new(&[("remote_address", "10.0.0.1"), ("path", "/login")]);
    let both = [address("10.0.0.1"), login.clone()];
    for _ in 0..3 {
        assert_eq!(proxy.ask(&both).await.overall_code(), Code::Ok);
    }
    let answer = proxy.ask(&both).await;
    assert_eq!(answer.overall_code(), Code::OverLimit);
    assert_eq!(
        summary(&answer.statuses[0]),
        (Code::Ok, 5, RateLimitUnit::Minute, 2),
        "it has room, and keeps it"
    );
    assert_eq!(
        summary(&answer.statuses[1]),
        (Code::OverLimit, 2, RateLimitUnit::Hour, 0),
        "what it gains in an hour"
    );
    let elsewhere = RateLimitDescriptor::new(&[("remote_address", "10.0.0.1"), ("path", "/")]);
    let answer = proxy.ask(&[elsewhere, address("10.0.0.1")]).await;
    assert_eq!(answer.statuses[0], DescriptorStatus { code: Code::Ok as i32, ..DescriptorStatus::default() });
    assert_eq!(summary(&answer.statuses[1]), (Code::Ok, 5, RateLimitUnit::Minute, 1));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_are_spent_and_0_hits_only_read() {
    let (server, proxy) = start().await;
    let hits = |hits| RateLimitDescriptor { hits_addend: Some(hits), ..address("10.0.0.1") };
    for _ in 0..3 {
        assert_eq!(
            summary(&proxy.ask(&[hits(0)]).await.statuses[0]),
            (Code::Ok, 5, RateLimitUnit::Minute, 5)
        );
    }
    assert_eq!(summary(&proxy.ask(&[hits(3)]).await.statuses[0]), (Code::Ok, 5, RateLimitUnit::Minute, 2));
    assert_eq!(
        summary(&proxy.ask(&[hits(3)]).await.statuses[0]),
        (Code::OverLimit, 5, RateLimitUnit::Minute, 2)
    );
    let most = proxy.ask(&[hits(1_000_000_000)]).await;
    assert_eq!(summary(&most.statuses[0]), (Code::OverLimit, 5, RateLimitUnit::Minute, 2));
    let two = RateLimitRequest { hits_addend: 2, ..question(&[address("10.0.0.1")]) };
    let answer = proxy.send(Request::new(two)).await.unwrap();
    assert_eq!(
        summary(&answer.statuses[0]),
        (Code::Ok, 5, RateLimitUnit::Minute, 0),
        "for all that do not say themselves"
    );
    let answer = proxy.ask(&[hits(0)]).await;
    assert_eq!(
        summary(&answer.statuses[0]),
        (Code::OverLimit, 5, RateLimitUnit::Minute, 0),
        "nothing would fit"
    );
    let mixed = proxy.ask(&[hits(0), address("10.0.0.9")]).await;
    assert_eq!(mixed.overall_code(), Code::OverLimit);
    assert_eq!(summary(&mixed.statuses[1]), (Code::Ok, 5, RateLimitUnit::Minute, 5), "nothing is spent");
    let read = RateLimitDescriptor { hits_addend: Some(0), ..address("10.0.0.8") };
    let mixed = proxy.ask(&[read, address("10.0.0.9")]).await;
    assert_eq!(summary(&mixed.statuses[1]), (Code::Ok, 5, RateLimitUnit::Minute, 4));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_descriptor_may_override_the_limit() {
    let (server, proxy) = start().await;
    let with = |amount, unit: RateLimitUnit, value| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit: amount, unit: unit as i32 }),
        ..address(value)
    };
    for left in [1, 0] {
        let answer = proxy.ask(&[with(2, RateLimitUnit::Hour, "10.0.0.1")]).await;
        assert_eq!(summary(&answer.statuses[0]), (Code::Ok, 2, RateLimitUnit::Hour, left));
    }
    let over = proxy.ask(&[with(2, RateLimitUnit::Hour, "10.0.0.1")]).await;
    assert_eq!(summary(&over.statuses[0]), (Code::OverLimit, 2, RateLimitUnit::Hour, 0));
    assert_eq!(
        summary(&proxy.ask(&[address("10.0.0.1")]).await.statuses[0]),
        (Code::Ok, 5, RateLimitUnit::Minute, 4)
    );
    let more = proxy.ask(&[with(4, RateLimitUnit::Hour, "10.0.0.1")]).await;
    assert_eq!(summary(&more.statuses[0]), (Code::Ok, 4, RateLimitUnit::Hour, 1), "spent hits stay counted");
    let nothing = proxy.ask(&[with(0, RateLimitUnit::Hour, "10.0.0.2"), address("10.0.0.2")]).await;
    assert_eq!(nothing.overall_code(), Code::OverLimit);
    assert_eq!(summary(&nothing.statuses[0]), (Code::OverLimit, 0, RateLimitUnit::Hour, 0));
    assert_eq!(summary(&nothing.statuses[1]), (Code::Ok, 5, RateLimitUnit::Minute, 5));
    let elsewhere =
        RateLimitRequest { domain: "unheard of".into(), ..question(&[with(1, RateLimitUnit::Day, "x")]) };
    for code in [Code::Ok, Code::OverLimit] {
        assert_eq!(
            proxy.send(Request::new(elsewhere.clone())).await.unwrap().overall_code(),
            code,
            "no policy is needed"
        );
    }
    let timeless =
        proxy.send(Request::new(question(&[with(1, RateLimitUnit::Unknown, "x")]))).await.unwrap_err();
    assert_eq!(timeless.code(), Fault::InvalidArgument);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn descriptors_without_a_policy_are_allowed_and_shadow_policies_never_deny() {
    let (server, proxy) = start().await;
    let unknown = RateLimitDescriptor::new(&[("generic_key", "x")]);
    let answer = proxy.ask(&[unknown]).await;
    assert_eq!((answer.overall_code(), answer.statuses.len()), (Code::Ok, 1));
    let nobodys = RateLimitRequest { domain: "other".into(), ..question(&[address("10.0.0.1")]) };
    for _ in 0..10 {
        let answer = proxy.send(Request::new(nobodys.clone())).await.unwrap();
        assert_eq!((answer.overall_code(), &answer.statuses[0].current_limit), (Code::Ok, &None));
    }
    for _ in 0..3 {
        let answer = proxy.ask(&[RateLimitDescriptor::new(&[("watched", "w")])]).await;
        assert_eq!(answer.overall_code(), Code::Ok);
        let (_, limit, unit, left) = summary(&answer.statuses[0]);
        assert_eq!((limit, unit, left), (1, RateLimitUnit::Unknown, 0), "90 s is no unit of Envoy's");
    }
    let long = "x".repeat(100_000);
    assert_eq!(summary(&proxy.ask(&[address(&long)]).await.statuses[0]).3, 4);
    assert_eq!(summary(&proxy.ask(&[address(&long)]).await.statuses[0]).3, 3);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_never_exceed_a_limit() {
    let (server, proxy) = start().await;
    // More than a connection may have at a time.
    let asks = (0..1_000).map(|_| {
        let proxy = proxy.clone();
        async move { proxy.ask(&[address("10.0.0.1")]).await.overall_code() }
    });
    let codes = join_all(asks).await;
    assert_eq!(codes.iter().filter(|code| **code == Code::Ok).count(), 5);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_after_a_refused_one_are_answered() {
    let (server, proxy) = start().await;
    let many = vec![address("x"); 65];
    let refused = proxy.send(Request::new(question(&many))).await.unwrap_err();
    assert_eq!(refused.code(), Fault::InvalidArgument);
    let huge = address(&"x".repeat(300_000));
    let refused = proxy.send(Request::new(question(&[huge]))).await.unwrap_err();
    assert_eq!(refused.code(), Fault::OutOfRange);
    let mut grpc = Grpc::new(proxy.0.clone());
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
    let path = "/envoy.service.ratelimit.v3.RateLimitService/Other".parse().unwrap();
    let refused = grpc.unary(Request::new(question(&[])), path, codec).await.unwrap_err();
    assert_eq!(refused.code(), Fault::Unimplemented);
    assert_eq!(proxy.ask(&[address("x")]).await.overall_code(), Code::Ok);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_request_that_does_not_end_is_refused_in_time() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "500ms")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let proxy = Proxy::connect(running.weir.grpc_addr());
    for method in [METHOD, "/grpc.health.v1.Health/Check"] {
        let mut grpc = Grpc::new(proxy.0.clone());
        grpc.ready().await.unwrap();
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let silent = Request::new(futures_util::stream::pending());
        let answer = grpc.client_streaming(silent, method.parse().unwrap(), codec);
        let answer = tokio::time::timeout(TEST_TIMEOUT / 2, answer).await.expect("an answer in time");
        assert_eq!(answer.unwrap_err().code(), Fault::DeadlineExceeded, "{method}");
    }
    let mut request = Request::new(question(&[address("x")]));
    request.metadata_mut().insert("x", "x".repeat(20_000).parse().unwrap());
    assert!(proxy.send(request).await.is_err(), "the head is too large");
    assert_eq!(proxy.ask(&[address("x")]).await.overall_code(), Code::Ok);
}

/// Sends a message whose first field has these bytes, which need not be UTF-8.
async fn send_first_field(proxy: &Proxy, bytes: &[u8]) -> Status {
    let mut grpc = Grpc::new(proxy.0.clone());
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<Vec<u8>, RateLimitResponse>::default();
    grpc.unary(Request::new(bytes.to_vec()), METHOD.parse().unwrap(), codec).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_message_is_an_invalid_argument_and_spends_nothing() {
    let (server, proxy) = start().await;
    let good = address("10.0.0.1");
    let hits = |hits| RateLimitDescriptor { hits_addend: Some(hits), ..good.clone() };
    let bad = [
        RateLimitRequest { domain: String::new(), ..question(&[hits(1)]) },
        RateLimitRequest { hits_addend: u32::MAX, ..question(&[hits(1)]) },
        question(&[]),
        question(&[good.clone(), RateLimitDescriptor::new(&[])]),
        question(&[good.clone(), RateLimitDescriptor::new(&[("", "x")])]),
        question(&[good.clone(), hits(u64::MAX)]),
    ];
    for request in bad {
        let refused = proxy.send(Request::new(request)).await.unwrap_err();
        assert_eq!(refused.code(), Fault::InvalidArgument, "{refused:?}");
        assert!(!refused.message().is_empty());
    }
    // The first field is the domain, and this one is not UTF-8.
    let refused = send_first_field(&proxy, b"\xff\xfe").await;
    assert_eq!(refused.code(), Fault::InvalidArgument, "{refused:?}");
    assert_eq!(summary(&proxy.ask(&[good]).await.statuses[0]), (Code::Ok, 5, RateLimitUnit::Minute, 4));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_public_listener_requires_credentials() {
    let (file, token_file) = (file(), "jwt.secret");
    // All addresses of the machine, so that other machines can connect.
    let port = weir_testkit::ports::unused();
    let running = weir()
        .env("WEIR_GRPC_LISTEN", format!("0.0.0.0:{port}"))
        .env("WEIR_CONFIG", file.path())
        .spawn()
        .await;
    let proxy = Proxy::connect(SocketAddr::from(([127, 0, 0, 1], port)));
    let secret = std::fs::read_to_string(running.data_dir().join(token_file)).unwrap();
    let bearing = |scope: &str| {
        let scope = Some(scope.to_owned());
        let claims = Claims { sub: "envoy".into(), exp: FAR_FUTURE, tenant_id: None, scope };
        format!("Bearer {}", jwt::sign(&secret, &claims).unwrap())
    };
    let with = |name: &'static str, value: String| {
        let mut request = Request::new(question(&[address("10.0.0.1")]));
        request.metadata_mut().insert(name, value.parse().unwrap());
        proxy.send(request)
    };
    let refused = proxy.send(Request::new(question(&[]))).await.unwrap_err();
    assert_eq!(refused.code(), Fault::Unauthenticated);
    let mut health = HealthClient::new(proxy.0.clone());
    let about = |service: String| HealthCheckRequest { service };
    let answer = health.check(about(SERVICE.to_owned())).await.unwrap().into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving, "health checks need no credentials");
    let long = health.check(about("x".repeat(2_000))).await.unwrap_err();
    assert_eq!(long.code(), Fault::OutOfRange, "a health check's name is bounded");
    assert_eq!(with("x-admin-key", "wrong".into()).await.unwrap_err().code(), Fault::Unauthenticated);
    assert_eq!(with("authorization", "Bearer x".into()).await.unwrap_err().code(), Fault::Unauthenticated);
    for scope in ["requests:read", "admin:read"] {
        let other = with("authorization", bearing(scope)).await.unwrap_err();
        assert_eq!(other.code(), Fault::PermissionDenied, "{scope}");
    }
    for scope in ["limits:check", "admin"] {
        let accepted = with("authorization", bearing(scope)).await.unwrap();
        assert_eq!(accepted.overall_code(), Code::Ok, "{scope}");
    }
    assert_eq!(with("x-admin-key", running.admin_key()).await.unwrap().overall_code(), Code::Ok);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_changes_health_to_not_serving() {
    let mut running = Running::start(Store::Embedded).await;
    let proxy = Proxy::connect(running.weir.grpc_addr());
    let mut health = HealthClient::new(proxy.0.clone());
    let ask = |service: &str| HealthCheckRequest { service: service.to_owned() };
    for service in ["", SERVICE] {
        let answer = health.check(ask(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
    assert_eq!(health.check(ask("other")).await.unwrap_err().code(), Fault::NotFound);
    let mut watch = health.watch(ask(SERVICE)).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    running.weir.terminate();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    let status = running.weir.wait(TEST_TIMEOUT).await;
    assert!(status.success(), "a health watch must not delay a stop: {status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_watches_health_twice_at_a_time() {
    let running = Running::start(Store::Embedded).await;
    let proxy = Proxy::connect(running.weir.grpc_addr());
    let watch = async |proxy: &Proxy| {
        let mut health = HealthClient::new(proxy.0.clone());
        health.watch(HealthCheckRequest::default()).await.map(tonic::Response::into_inner)
    };
    let first = watch(&proxy).await.unwrap();
    let mut second = watch(&proxy).await.unwrap();
    assert_eq!(second.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    assert_eq!(watch(&proxy).await.unwrap_err().code(), Fault::ResourceExhausted);
    assert!(watch(&Proxy::connect(running.weir.grpc_addr())).await.is_ok(), "another connection");
    let nothing = RateLimitRequest { domain: "nothing".into(), ..question(&[address("x")]) };
    assert_eq!(proxy.send(Request::new(nothing)).await.unwrap().overall_code(), Code::Ok, "requests go on");
    drop(first);
    wait::until("the stream has ended", TEST_TIMEOUT, async || watch(&proxy).await.is_ok()).await;
}

#[tokio::test]
async fn a_server_without_the_api_role_does_not_listen() {
    let running = Running::start_with(Store::Embedded, &[("WEIR_ROLES", "sender")]).await;
    assert!(tokio::net::TcpStream::connect(running.weir.grpc_addr()).await.is_err());
}

/// Runs the Python client, and returns its output: two health checks, then one response per request.
fn call_from_python(address: SocketAddr, requests: &[Value]) -> Vec<Value> {
    let python = weir_testkit::python_with_grpc()
        .unwrap_or_else(|problem| panic!("{problem}; WEIR_TEST_SKIP=python leaves this out"));
    let root = env!("CARGO_MANIFEST_DIR");
    let mut child = Command::new(python)
        .arg(format!("{root}/tests/it/grpc/client.py"))
        .args([address.to_string(), format!("{root}/../server/proto")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: String = requests.iter().map(|question| format!("{question}\n")).collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "the Python client failed; its errors are above");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_generated_from_the_proto_files_works() {
    if weir_testkit::skip("python") {
        return;
    }
    let (server, _proxy) = start().await;
    let address = server.grpc_address();
    let descriptor = json!({"entries": [{"key": "remote_address", "value": "10.0.0.1"}]});
    let mut overridden = descriptor.clone();
    overridden["limit"] = json!({"requestsPerUnit": 7, "unit": "DAY"});
    let mut read = descriptor.clone();
    read["hitsAddend"] = json!("0");
    let ask = |descriptor: &Value, hits: u32| json!({"domain": "edge", "descriptors": [descriptor], "hitsAddend": hits});
    let mut timeless = overridden.clone();
    timeless["limit"]["unit"] = json!("UNKNOWN");
    let requests =
        [ask(&descriptor, 4), ask(&read, 0), ask(&descriptor, 2), ask(&overridden, 0), ask(&timeless, 0)];
    let responses = tokio::task::spawn_blocking(move || call_from_python(address, &requests)).await.unwrap();
    let limit = json!({"name": "per_address", "requestsPerUnit": 5, "unit": "MINUTE"});
    let day = json!({"name": "per_address", "requestsPerUnit": 7, "unit": "DAY"});
    let status = |code: &str, limit: &Value, left: u32, reset: &str| json!({"code": code, "currentLimit": limit, "limitRemaining": left, "durationUntilReset": reset});
    let expected = [
        json!({"status": "SERVING"}),
        json!({"status": "SERVING"}),
        json!({"overallCode": "OK", "statuses": [status("OK", &limit, 1, "60s")]}),
        json!({"overallCode": "OK", "statuses": [status("OK", &limit, 1, "60s")]}),
        json!({
            "overallCode": "OVER_LIMIT",
            "statuses": [status("OVER_LIMIT", &limit, 1, "60s")],
            "responseHeadersToAdd": [{"key": "retry-after", "value": "60"}],
        }),
        json!({"overallCode": "OK", "statuses": [status("OK", &day, 6, "86400s")]}),
        json!({"error": "INVALID_ARGUMENT"}),
    ];
    assert_eq!(responses, expected);
    server.stop().await;
}
