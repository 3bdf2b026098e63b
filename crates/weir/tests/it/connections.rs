//! Connections of callers: requests that are pipelined, split, slow, incomplete, too large or ambiguous. The tests of the routes
//! cover the contents of requests.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fixtures::{InProcess, Running, Store, TEST_TIMEOUT, configure};

const GET: &str = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
/// A request after which the server closes the connection.
const LAST: &str = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

fn post(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    let json = "content-type: application/json";
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\n{json}\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
}

fn send(user: &str) -> String {
    post("/api/send", "", &format!(r#"{{"userId":"{user}","message":"m"}}"#))
}

/// Sends the parts and returns the responses until the server closes the connection.
async fn exchange(address: SocketAddr, parts: &[&str]) -> Vec<RawResponse> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for part in parts {
        // The server may respond and close before it has read everything.
        if stream.write_all(part.as_bytes()).await.is_err() {
            break;
        }
        // Gives each part the chance to be sent separately. The responses are the same if two are sent together.
        tokio::task::yield_now().await;
    }
    let mut text = Vec::new();
    let reading = async { while let Ok(1..) = stream.read_buf(&mut text).await {} };
    tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("the server closes the connection");
    RawResponse::parse_all(&String::from_utf8(text).unwrap())
}

#[derive(Debug, PartialEq, Eq)]
struct RawResponse {
    status: u16,
    headers: Vec<String>,
    body: String,
}

impl RawResponse {
    fn parse_all(mut text: &str) -> Vec<Self> {
        let mut responses = Vec::new();
        while let Some((head, rest)) = text.split_once("\r\n\r\n") {
            let mut lines = head.lines();
            let status = lines.next().unwrap()[9..12].parse().unwrap();
            let headers: Vec<String> = lines.map(str::to_owned).collect();
            let length = headers.iter().find_map(|line| line.strip_prefix("content-length: "));
            let (body, rest) = rest.split_at(length.map_or(0, |length| length.parse().unwrap()));
            responses.push(Self { status, headers, body: body.to_owned() });
            text = rest;
        }
        assert_eq!(text, "", "bytes after the last response");
        responses
    }

    fn count(&self, name: &str) -> usize {
        self.headers.iter().filter(|line| line.starts_with(&format!("{name}: "))).count()
    }
}

fn statuses(responses: &[RawResponse]) -> Vec<u16> {
    responses.iter().map(|response| response.status).collect()
}

/// Starts a server with two users: `many` has a large quota, and `one` has used up its quota.
async fn start() -> Running {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "many", 1_000_000, 60).await;
    configure(&client, "one", 1, 60).await;
    assert_eq!(statuses(&exchange(server.weir.addr(), &[&send("one"), LAST]).await), [200, 200]);
    server
}

#[tokio::test]
async fn a_refused_request_leaves_its_connection_open() {
    let server = start().await;
    let address = server.weir.addr();
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let purchase = r#"{"sku":"a","qty":2}"#;
    for (status, call) in [
        (429, send("one")),
        (404, send("nobody")),
        (400, post("/api/send", "", "{")),
        (400, post("/api/send", "", "")),
        (415, post("/api/send", "content-encoding: gzip\r\n", "{}")),
        (415, post("/api/send", "", "{}").replace("application/json", "text/plain")),
        (400, post("/api/v1/slots", "", "{}")),
        (401, post("/v1/requests", "", "{}")),
        (401, post("/v1/requests", "authorization: Bearer a.b.c\r\n", "{}")),
        (401, post("/v1/check", "", r#"{"checks":[]}"#)),
        (401, post("/v1/refund", "x-admin-key: wrong\r\n", "{}")),
        (401, post("/v1/settle", "", "[]")),
        (401, post("/api/v1/ai/chat", "", "{}")),
        (400, post("/api/v1/purchases", "", r#"{"sku":"a","qty":1}"#)),
        (400, post("/api/v1/purchases", "x-user-id: u@example.com\r\n", purchase)),
        (400, get("/api/v1/purchases?sku=a")),
        (404, get("/api/v1/sales")),
        (400, get("/api/v1/sales?sku=%zz&sku=b")),
        (404, get("/nowhere")),
        (405, get("/api/send")),
    ] {
        let responses = exchange(address, &[GET, &call, LAST]).await;
        assert_eq!(statuses(&responses), [200, status, 200], "{call}");
        let refused = &responses[1];
        assert!(!refused.body.is_empty(), "{call}");
        for name in ["date", "x-request-id", "content-length"] {
            assert_eq!(refused.count(name), 1, "{name} of {refused:?}");
        }
    }
}

#[tokio::test]
async fn pipelined_and_split_requests_are_answered_in_order() {
    let server = start().await;
    let address = server.weir.addr();
    let (one, many) = (send("one"), send("many"));
    let pipelined = [&many, &one, &many, GET, &one, &many, LAST].concat();
    let expected = [200, 429, 200, 200, 429, 200, 200];
    assert_eq!(statuses(&exchange(address, &[&pipelined]).await), expected);
    for size in [1, 7, 40, 150] {
        let parts: Vec<&str> =
            pipelined.as_bytes().chunks(size).map(|part| str::from_utf8(part).unwrap()).collect();
        assert_eq!(statuses(&exchange(address, &parts).await), expected, "in pieces of {size}");
    }
    let (head, body) = many.split_once("\r\n\r\n").unwrap();
    let split = [&format!("{head}\r\n\r\n")[..], body, &one, LAST];
    assert_eq!(statuses(&exchange(address, &split).await), [200, 429, 200]);
}

#[tokio::test]
async fn hundreds_of_pipelined_requests_are_all_answered() {
    let server = start().await;
    let calls = [&send("many").repeat(300), LAST].concat();
    let responses = exchange(server.weir.addr(), &[&calls]).await;
    assert_eq!(statuses(&responses), [200; 301]);
}

#[tokio::test]
async fn an_ambiguous_length_is_refused_and_closes_the_connection() {
    let server = start().await;
    let address = server.weir.addr();
    let hidden = send("many");
    for lines in [
        "content-length: 2\r\ncontent-length: 300",
        "content-length: 2, 300",
        "content-length: +2",
        "content-length: 0x2",
        "content-length: ",
        "content-length: 18446744073709551618",
        "content-length : 2",
        "content-length: 2\r\ntransfer-encoding: chunked",
        "transfer-encoding: identity\r\ncontent-length: 2",
        "transfer-encoding: chunked, identity",
        "content-length: 2\r\n 1",
    ] {
        let head = format!(
            "POST /api/send HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{lines}\r\n\r\n"
        );
        let responses = exchange(address, &[&format!("{head}{{}}{hidden}")]).await;
        assert_eq!(statuses(&responses), [400], "{lines}");
    }
}

#[tokio::test]
async fn a_connection_is_closed_only_when_the_caller_asks_for_it() {
    let server = start().await;
    let address = server.weir.addr();
    let closing = send("many").replace("host: localhost", "host: localhost\r\nconnection: close");
    let responses = exchange(address, &[&send("many"), &closing]).await;
    assert_eq!(statuses(&responses), [200, 200], "it closes after the second");
    assert!(responses[1].headers.contains(&"connection: close".to_owned()), "{:?}", responses[1]);
    let after = exchange(address, &[&closing, &send("many")]).await;
    assert_eq!(statuses(&after), [200], "later requests are not answered");
    let http_1_0 = send("many").replace("HTTP/1.1", "HTTP/1.0");
    assert_eq!(statuses(&exchange(address, &[&http_1_0]).await), [200], "HTTP/1.0 closes");
    let http_1_0_keep_alive =
        http_1_0.replace("host: localhost", "host: localhost\r\nconnection: keep-alive");
    assert_eq!(statuses(&exchange(address, &[&http_1_0_keep_alive, LAST]).await), [200, 200]);
    let keep_alive = send("many").replace("host: localhost", "host: localhost\r\nconnection: keep-alive");
    assert_eq!(statuses(&exchange(address, &[&keep_alive, &keep_alive, LAST]).await), [200, 200, 200]);
}

#[tokio::test]
async fn bodies_of_every_framing_are_read() {
    let server = start().await;
    let address = server.weir.addr();
    let expecting = send("many").replace("host: localhost", "host: localhost\r\nexpect: 100-continue");
    let responses = exchange(address, &[&expecting, LAST]).await;
    let final_ones: Vec<u16> = statuses(&responses).into_iter().filter(|status| *status != 100).collect();
    assert_eq!(final_ones, [200, 200], "{responses:?}");
    let chunked = "POST /api/send HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                   transfer-encoding: chunked\r\n\r\n1d\r\n{\"userId\":\"many\",\"message\":1}\r\n0\r\n\r\n";
    let responses = exchange(address, &[&send("many"), chunked, LAST]).await;
    assert_eq!(statuses(&responses), [200, 400, 200]);
    assert!(responses[1].body.contains("message must be a string"), "{:?}", responses[1]);
    let body = r#"{"userId":"many","message":"m"}"#;
    let bytes: String = body.chars().map(|byte| format!("1\r\n{byte}\r\n")).collect();
    let head = chunked.split_once("1d\r\n").unwrap().0;
    let responses = exchange(address, &[&format!("{head}{bytes}0\r\n\r\n"), LAST]).await;
    assert_eq!(statuses(&responses), [200, 200], "one chunk per byte");
    for length in [10_000, 100_000, 1_000_000] {
        let large = format!(r#"{{"userId":"many","message":"{}"}}"#, "x".repeat(length));
        let responses = exchange(address, &[&post("/api/send", "", &large), &send("many"), LAST]).await;
        assert_eq!(statuses(&responses), [200, 200, 200], "{length}");
    }
}

#[tokio::test]
async fn a_caller_that_waits_for_100_continue_gets_it() {
    let server = start().await;
    let call = send("many").replace("host: localhost", "host: localhost\r\nexpect: 100-continue");
    let (head, body) = call.split_once("\r\n\r\n").unwrap();
    let mut stream = TcpStream::connect(server.weir.addr()).await.unwrap();
    stream.write_all(format!("{head}\r\n\r\n").as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    tokio::time::timeout(TEST_TIMEOUT, stream.read_exact(&mut interim)).await.expect("a response").unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut status = [0; 15];
    tokio::time::timeout(TEST_TIMEOUT, stream.read_exact(&mut status)).await.expect("a response").unwrap();
    assert_eq!(&status, b"HTTP/1.1 200 OK");
}

#[tokio::test]
async fn an_incomplete_request_times_out() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "200ms")];
    let server = Running::start_with(Store::Embedded, &settings).await;
    let address = server.weir.addr();
    let call = send("many");
    for half in ["", "POST /api/send HT", "POST /api/send HTTP/1.1\r\nhost: localhost\r\n"] {
        let responses = exchange(address, &[half]).await;
        assert!(statuses(&responses).is_empty() || statuses(&responses) == [408], "{half}: {responses:?}");
    }
    let chunked = "POST /api/send HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                   transfer-encoding: chunked\r\n\r\n1d\r\n{";
    for half in [&call[..call.len() - 3], chunked] {
        assert_eq!(statuses(&exchange(address, &[half]).await), [408], "{half}");
        assert_eq!(statuses(&exchange(address, &[GET, half]).await), [200, 408], "{half}");
    }
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused_and_closes_the_connection() {
    let server = start().await;
    let address = server.weir.addr();
    let line = |length: usize| {
        format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(length))
    };
    assert_eq!(statuses(&exchange(address, &[&line(30_000), LAST]).await), [200, 200]);
    let too_large = [
        line(1_000_000),
        format!("GET /livez HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x: 1\r\n".repeat(1_000)),
        format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x".repeat(100_000)),
        "x".repeat(1_000_000),
    ];
    for call in too_large {
        let responses = exchange(address, &[&call, LAST]).await;
        assert!(matches!(statuses(&responses)[..], [400 | 414 | 431]), "{call:.40}: {responses:?}");
    }
    assert_eq!(statuses(&exchange(address, &[LAST]).await), [200]);
}

#[tokio::test]
async fn a_request_must_have_exactly_one_host() {
    let server = start().await;
    let address = server.weir.addr();
    let get = |version: &str, hosts: &str| {
        format!("GET /api/v1/sales {version}\r\n{hosts}connection: close\r\n\r\n")
    };
    for (version, hosts, status) in [
        ("HTTP/1.1", "host: localhost\r\n", 404),
        ("HTTP/1.1", "", 400),
        ("HTTP/1.1", "host: localhost\r\nhost: localhost\r\n", 400),
        ("HTTP/1.0", "", 404),
        ("HTTP/1.0", "host: localhost\r\nhost: localhost\r\n", 400),
    ] {
        let responses = exchange(address, &[&get(version, hosts)]).await;
        assert_eq!(statuses(&responses), [status], "{version} {hosts}");
        let body = &responses[0].body;
        let is_named = body.contains(r#""code":"VALIDATION_ERROR""#) && body.contains("Host");
        assert_eq!(is_named, status == 400, "{responses:?}");
    }
}

#[tokio::test]
async fn a_server_on_loopback_accepts_only_names_of_this_machine() {
    let server = start().await;
    let call = |host: &str| LAST.replace("host: localhost", &format!("host: {host}"));
    let get = async |server: &Running, host: &str| exchange(server.weir.addr(), &[&call(host)]).await;
    for host in ["localhost", "LOCALHOST:8080", "weir.localhost", "127.0.0.1", "127.1.2.3:1", "[::1]:8080"] {
        assert_eq!(statuses(&get(&server, host).await), [200], "{host}");
    }
    for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "[::2]", ""] {
        let responses = get(&server, host).await;
        assert_eq!(statuses(&responses), [400], "{host}");
        assert!(responses[0].body.contains("http.allowed_hosts"), "{responses:?}");
    }
    let absolute = LAST.replace("GET /livez", "GET http://evil.example/livez");
    assert_eq!(statuses(&exchange(server.weir.addr(), &[&absolute]).await), [400]);
    let named = [("WEIR_HTTP_ALLOWED_HOSTS", "weir.example, shop.example")];
    let named = Running::start_with(Store::Embedded, &named).await;
    assert_eq!(statuses(&get(&named, "Shop.Example:443").await), [200]);
    assert_eq!(statuses(&get(&named, "evil.example").await), [400]);
    let everywhere = [("WEIR_LISTEN", "0.0.0.0:0"), ("WEIR_ALLOW_ANONYMOUS", "true")];
    let everywhere = InProcess::start_with(Store::Embedded, &everywhere).await;
    let headers = [("host", "any.example")];
    let response = everywhere.client.request(http::Method::GET, "/livez", &headers, "").await.unwrap();
    assert_eq!(response.status, 200, "a server on the network accepts every name");
}

/// Sends a whole request before it reads anything, as many clients do. Returns everything it reads.
fn send_all_then_read(address: SocketAddr, call: &[u8]) -> std::io::Result<Vec<u8>> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    stream.write_all(call)?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    Ok(response)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_with_a_large_body_can_read_why_it_is_refused() {
    let server = start().await;
    let address = server.weir.addr();
    let body = "x".repeat(8 << 20);
    let chunked = |body: &str| {
        let head = "POST /api/send HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        format!("{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
    };
    for (status, call) in [
        ("401", post("/v1/requests", "", &body)),
        ("401", post("/api/v1/ai/chat", "", &body)),
        ("404", post("/nowhere", "", &body)),
        ("413", post("/api/send", "", &body)),
        ("413", chunked(&body)),
        ("431", format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {body}\r\n\r\n")),
    ] {
        for round in 0..10 {
            let call = call.clone();
            let response = tokio::task::spawn_blocking(move || send_all_then_read(address, call.as_bytes()));
            let response =
                response.await.unwrap().unwrap_or_else(|error| panic!("{status}, round {round}: {error}"));
            let line = format!("HTTP/1.1 {status}");
            let text = String::from_utf8_lossy(&response);
            assert!(response.starts_with(line.as_bytes()), "{status}: {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_common_client_can_read_why_a_large_body_is_refused() {
    if weir_testkit::skip("python") {
        return;
    }
    let server = start().await;
    let script = "import http.client, sys\n\
                  for _ in range(10):\n    \
                      connection = http.client.HTTPConnection(sys.argv[1], timeout=30)\n    \
                      connection.request('POST', '/v1/requests', b'x' * (16 << 20))\n    \
                      print(connection.getresponse().status)\n    \
                      connection.close()\n";
    let mut python = std::process::Command::new("python3");
    python.args(["-c", script, &server.weir.addr().to_string()]);
    let output = tokio::task::spawn_blocking(move || python.output().expect("python3")).await.unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(printed, "401\n".repeat(10), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn a_caller_that_keeps_sending_after_its_response_is_disconnected() {
    let server = start().await;
    let mut stream = TcpStream::connect(server.weir.addr()).await.unwrap();
    let length = 1_u64 << 40;
    let head = format!("POST /v1/requests HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let piece = vec![b'x'; 1 << 20];
    let mut sent = 0_u64;
    let sending = async {
        while stream.write_all(&piece).await.is_ok() {
            sent += piece.len() as u64;
            assert!(sent < 1 << 30, "more than the server should read");
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, sending).await.expect("the server closes the connection");
}
