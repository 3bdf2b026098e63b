//! Request bytes that are built once: a connection replaces the digits of the key and sends the same buffer again.
//!
//! The key has a fixed width, so neither the length of the body nor any header changes between requests.

use std::ops::Range;

/// Digits of a key inside a request.
pub(crate) const KEY_DIGITS: usize = 10;

/// A request body around the ten digits of a key.
#[derive(Debug, Clone)]
pub struct Body {
    /// The text before the digits.
    pub before: String,
    /// The text after the digits.
    pub after: String,
}

/// A complete request whose key can be set in place.
#[derive(Debug, Clone)]
pub struct Template {
    bytes: Vec<u8>,
    digits: Range<usize>,
}

impl Template {
    /// `POST path` with a JSON body; the key is 0 until [`set_key`](Self::set_key).
    #[must_use]
    pub fn post_json(authority: &str, path: &str, body: &Body) -> Self {
        Self::post_json_with(authority, path, &[], body)
    }

    /// Like [`post_json`](Self::post_json), with additional headers.
    #[must_use]
    pub fn post_json_with(authority: &str, path: &str, headers: &[(&str, &str)], body: &Body) -> Self {
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.before.len() + KEY_DIGITS + body.after.len();
        let mut bytes = format!(
            "POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n{headers}\r\n{}",
            body.before
        )
        .into_bytes();
        let digits = bytes.len()..bytes.len() + KEY_DIGITS;
        bytes.resize(digits.end, b'0');
        bytes.extend_from_slice(body.after.as_bytes());
        Self { bytes, digits }
    }

    /// A request with the key in a header, after a given prefix, and with or without a JSON body.
    #[must_use]
    pub fn keyed_by_header(
        method: &str,
        authority: &str,
        path: &str,
        (name, before): (&str, &str),
        body: Option<&str>,
    ) -> Self {
        let body_headers = body.map_or_else(String::new, |body| {
            format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())
        });
        let mut bytes =
            format!("{method} {path} HTTP/1.1\r\nHost: {authority}\r\n{body_headers}{name}: {before}")
                .into_bytes();
        let digits = bytes.len()..bytes.len() + KEY_DIGITS;
        bytes.resize(digits.end, b'0');
        bytes.extend_from_slice(b"\r\n\r\n");
        bytes.extend_from_slice(body.unwrap_or_default().as_bytes());
        Self { bytes, digits }
    }

    /// Replaces the digits by `key`, or by the last ten digits of a longer number.
    pub fn set_key(&mut self, key: u64) {
        let mut rest = key;
        for digit in self.bytes[self.digits.clone()].iter_mut().rev() {
            *digit = b"0123456789"[(rest % 10) as usize];
            rest /= 10;
        }
    }

    /// The request as it goes on the wire.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template() -> Template {
        let body = Body { before: r#"{"userId":"u"#.into(), after: r#"","message":"é"}"#.into() };
        Template::post_json("localhost:1", "/api/send", &body)
    }

    fn body_of(template: &Template) -> &str {
        std::str::from_utf8(template.bytes()).unwrap().split_once("\r\n\r\n").unwrap().1
    }

    #[test]
    fn the_length_is_that_of_the_body_in_bytes() {
        let template = template();
        let text = std::str::from_utf8(template.bytes()).unwrap();
        assert!(text.contains(&format!("Content-Length: {}\r\n", body_of(&template).len())), "{text}");
        assert!(text.starts_with("POST /api/send HTTP/1.1\r\nHost: localhost:1\r\n"), "{text}");
    }

    #[test]
    fn a_key_may_be_in_a_header() {
        let header = ("X-User-Id", "u");
        let mut template = Template::keyed_by_header("POST", "localhost:1", "/a", header, Some("{}"));
        template.set_key(42);
        let expected = "POST /a HTTP/1.1\r\nHost: localhost:1\r\nContent-Type: application/json\r\n\
                        Content-Length: 2\r\nX-User-Id: u0000000042\r\n\r\n{}";
        assert_eq!(std::str::from_utf8(template.bytes()).unwrap(), expected);
        let template = Template::keyed_by_header("GET", "localhost:1", "/a", header, None);
        let expected = "GET /a HTTP/1.1\r\nHost: localhost:1\r\nX-User-Id: u0000000000\r\n\r\n";
        assert_eq!(std::str::from_utf8(template.bytes()).unwrap(), expected);
    }

    #[test]
    fn a_key_replaces_the_former_one() {
        let mut template = template();
        assert_eq!(body_of(&template), r#"{"userId":"u0000000000","message":"é"}"#);
        template.set_key(9_876_543_210);
        template.set_key(42);
        assert_eq!(body_of(&template), r#"{"userId":"u0000000042","message":"é"}"#);
    }
}
