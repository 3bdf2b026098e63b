use http::HeaderName;

use super::super::headers::strip;
use super::*;

const HOST_OF_UPSTREAM: HeaderValue = HeaderValue::from_static("upstream:9000");

fn map(lines: &[(&str, &str)]) -> HeaderMap {
    lines
        .iter()
        .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
        .collect()
}

/// What was written, read again.
fn read(text: &[u8]) -> (String, HeaderMap, Vec<u8>) {
    let mut lines = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut lines);
    let httparse::Status::Complete(length) = request.parse(text).unwrap() else { panic!("{text:?}") };
    let headers = request
        .headers
        .iter()
        .map(|line| (line.name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(line.value).unwrap()));
    (
        format!("{} {}", request.method.unwrap(), request.path.unwrap()),
        headers.collect(),
        text[length..].to_vec(),
    )
}

/// The values of each header, in order; the names in none.
fn sorted(headers: &HeaderMap) -> Vec<(String, Vec<HeaderValue>)> {
    let mut lines: Vec<_> = headers
        .keys()
        .map(|name| (name.to_string(), headers.get_all(name).iter().cloned().collect()))
        .collect();
    lines.sort_by(|a: &(String, _), b| a.0.cmp(&b.0));
    lines
}

/// Every head that callers send here, with and without its lines.
fn heads() -> Vec<HeaderMap> {
    let all = [
        ("host", "weir.example"),
        ("authorization", "Bearer weir-token"),
        ("x-admin-key", "key"),
        ("x-weir-user", "somebody else"),
        ("x-forwarded-for", "1.2.3.4"),
        ("x-forwarded-for", "5.6.7.8"),
        ("x-forwarded-host", "evil.example"),
        ("x-forwarded-host", "worse.example"),
        ("x-forwarded-proto", "https"),
        ("forwarded", "for=1.2.3.4"),
        ("via", "1.0 before"),
        ("via", "1.1 between"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("accept", "*/*"),
        ("x-request-id", "id"),
        ("connection", "keep-alive"),
        ("keep-alive", "5"),
        ("proxy-connection", "close"),
        ("proxy-authorization", "Basic x"),
        ("proxy-authenticate", "x"),
        ("te", "gzip"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("expect", "100-continue"),
        ("trailer", "x-sum"),
    ];
    let without = (0..all.len()).map(|place| {
        let rest: Vec<_> =
            all.iter().enumerate().filter(|(n, _)| *n != place).map(|(_, line)| *line).collect();
        map(&rest)
    });
    let alone = all.iter().map(|line| map(&[*line]));
    without.chain(alone).chain([map(&all), HeaderMap::new()]).collect()
}

#[test]
fn both_ways_make_the_same_request() {
    let own = HeaderValue::from_static("Bearer sk-1");
    let targets = ["/api/v1/ai/x?a=1&b", "http://other.example:80/api/v1/ai/x"].map(Uri::from_static);
    for headers in heads() {
        for bits in 0..8_u8 {
            let addition = Addition {
                caller: None,
                user: "ü 50%",
                host: &HOST_OF_UPSTREAM,
                authorization: (bits & 1 > 0).then_some(&own),
                forward_authorization: bits & 2 > 0,
                trust_forwarded: bits & 4 > 0,
            };
            for target in &targets {
                let text = write(&Method::POST, target, &headers, &Bytes::from_static(b"{}"), &addition);
                let (line, written, body) = read(&text);
                assert_eq!(
                    (line, &body[..]),
                    (format!("POST {}", target.path_and_query().unwrap()), &b"{}"[..])
                );
                let mut made = headers.clone();
                strip(&mut made);
                addition.apply(&mut made, target);
                made.insert(CONTENT_LENGTH, HeaderValue::from_static("2"));
                assert_eq!(
                    sorted(&written),
                    sorted(&made),
                    "{headers:?} {addition_bits}",
                    addition_bits = bits
                );
            }
        }
    }
}

#[test]
fn a_body_is_announced_where_there_is_one_or_was_said_to_be() {
    let addition = Addition {
        caller: None,
        user: "a",
        host: &HOST_OF_UPSTREAM,
        authorization: None,
        forward_authorization: false,
        trust_forwarded: false,
    };
    let length = |headers: &HeaderMap, body: &'static str| {
        let (_, headers, got) = read(&write(
            &Method::GET,
            &Uri::from_static("/x"),
            headers,
            &Bytes::from_static(body.as_bytes()),
            &addition,
        ));
        assert_eq!(got, body.as_bytes());
        headers.get(CONTENT_LENGTH).map(|length| length.to_str().unwrap().to_owned())
    };
    assert_eq!(length(&HeaderMap::new(), ""), None);
    assert_eq!(length(&map(&[("content-length", "0")]), "").as_deref(), Some("0"));
    assert_eq!(length(&map(&[("content-length", "5")]), "hello").as_deref(), Some("5"));
}
