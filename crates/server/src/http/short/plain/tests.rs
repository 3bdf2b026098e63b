use proptest::prelude::*;

use super::*;

const SEND: &str =
    "POST /api/send?x=1 HTTP/1.1\r\nHost: a\r\ncontent-LENGTH: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello";

fn find(method: &Method, path: &str) -> Option<&'static str> {
    match (method.as_str(), path) {
        ("POST", "/api/send") => Some("send"),
        ("GET", "/api/v1/sales") => Some("sales"),
        _ => None,
    }
}

fn taken(text: &str) -> Result<(Request<Bytes>, &'static str), Not> {
    take(&mut Bytes::copy_from_slice(text.as_bytes()), find)
}

#[test]
fn a_plain_request_is_taken_as_it_is_and_what_follows_is_left() {
    let mut bytes = Bytes::from(format!("{SEND}GET /next"));
    let (request, route) = take(&mut bytes, find).unwrap();
    assert_eq!((route, &bytes[..]), ("send", &b"GET /next"[..]));
    assert_eq!((request.method(), request.uri()), (&Method::POST, &"/api/send?x=1".parse::<Uri>().unwrap()));
    assert_eq!(request.headers()["host"], "a");
    let both: Vec<_> = request.headers().get_all("x-a").iter().collect();
    assert_eq!(both, ["1", "2"]);
    assert_eq!(request.into_body(), "hello");
    let (request, route) = taken("GET /api/v1/sales HTTP/1.1\r\nconnection: Keep-Alive\r\n\r\n").unwrap();
    assert_eq!((route, request.headers().len()), ("sales", 1));
    assert!(request.into_body().is_empty());
}

#[test]
fn the_beginning_of_a_plain_request_is_waited_for() {
    for end in 0..SEND.len() {
        assert_eq!(taken(&SEND[..end]).unwrap_err(), Not::Whole, "{end}");
    }
}

#[test]
fn whatever_is_special_is_left_for_hyper() {
    let long = "x".repeat(REQUEST_MAX);
    let many = "a: b\r\n".repeat(HEADERS_MAX);
    for (line, headers) in [
        ("GET /api/send HTTP/1.1", ""),
        ("PUT /api/send HTTP/1.1", "content-length: 1\r\n"),
        ("POST /api/other HTTP/1.1", "content-length: 1\r\n"),
        ("POST /api/send/ HTTP/1.1", "content-length: 1\r\n"),
        ("POST http://a/api/send HTTP/1.1", "content-length: 1\r\n"),
        ("POST /api/send HTTP/1.0", "content-length: 1\r\n"),
        ("POST /api/send HTTP/1.1", ""),
        ("GET /api/v1/sales HTTP/1.1", "content-length: 0\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\ncontent-length: 1\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1, 1\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: +1\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 0x1\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: \r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 65536\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 18446744073709551617\r\n"),
        ("POST /api/send HTTP/1.1", "content-length : 1\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\n x\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\nTransfer-Encoding: chunked\r\n"),
        ("POST /api/send HTTP/1.1", "transfer-encoding: identity\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\nconnection: close\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\nconnection: keep-alive, x-a\r\n"),
        ("POST /api/send HTTP/1.1", "content-length: 1\r\nexpect: 100-continue\r\n"),
        ("GET /api/v1/sales HTTP/1.1", "connection: upgrade\r\nupgrade: websocket\r\n"),
        ("GET /api/v1/sales HTTP/1.1", "upgrade: h2c\r\n"),
        ("GET /api/v1/sales HTTP/1.1", "a: b\u{1}\r\n"),
        ("GET /api/v1/sales?\u{1} HTTP/1.1", ""),
        ("GET /api/v1/sales?a b HTTP/1.1", ""),
        ("GET /api/v1/sales HTTP/1.1", &format!("a: {long}\r\n")),
        ("GET /api/v1/sales HTTP/1.1", &format!("{many}a: b\r\n")),
    ] {
        let text = format!("{line}\r\n{headers}\r\nx");
        let mut bytes = Bytes::copy_from_slice(text.as_bytes());
        assert_eq!(take(&mut bytes, find).unwrap_err(), Not::Plain, "{line} {headers:.40}");
        assert_eq!(bytes, text, "nothing is lost");
    }
    assert_eq!(taken(&format!("GET /{long}")).unwrap_err(), Not::Plain, "a head without an end");
}

proptest! {
    /// Whatever comes, all of it is either taken or left, and a request that is taken ends where its length says.
    #[test]
    fn nothing_is_lost_or_made_up(
        text in r"(POST|GET|HEAD) (/api/send|/api/v1/sales|/) HTTP/1\.[01]\r\n(((content-length|a|expect): [0-9]{0,2})\r\n){0,3}\r\n[a-z]{0,30}",
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        is_changed in any::<bool>(),
    ) {
        let mut text = text.into_bytes();
        if is_changed {
            *at.get_mut(&mut text) = byte;
        }
        let mut left = Bytes::from(text.clone());
        match take(&mut left, find) {
            Ok((request, _)) => {
                prop_assert!(text.ends_with(&left));
                let body = request.body().len() as u64;
                let told = request.headers().get("content-length");
                let told: u64 = told.map_or(0, |told| told.to_str().unwrap().parse().unwrap());
                prop_assert_eq!(body, told);
                let head = text.len() - left.len() - usize::try_from(body).unwrap();
                prop_assert!(text[..head].ends_with(b"\n\r\n") || text[..head].ends_with(b"\n\n"));
            }
            Err(_) => prop_assert_eq!(&left[..], &text[..]),
        }
    }
}
