//! Encodes a request as text: its fields in order, each as `length:value`, absent ones as `-:`. Bytes are in hexadecimal.

use std::fmt::Write as _;

use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, RequestType, TenantId, Timestamp, TraceContext};
use weir_store::request::{Failure, Request, Sealed};

/// The version of the encoding, its first field. A cached request of another version is read from the store.
const VERSION: &str = "2";

pub(super) fn encode(request: &Request) -> String {
    let mut text = String::new();
    let mut add = |field: Option<&str>| match field {
        // Writing to a string cannot fail.
        Some(field) => drop(write!(text, "{}:{field}", field.len())),
        None => text.push_str("-:"),
    };
    let number = |number: i64| number.to_string();
    let result = request.result.as_ref();
    let failure = request.failure.as_ref();
    add(Some(VERSION));
    add(Some(request.tenant.as_str()));
    add(Some(request.request_type.as_str()));
    add(Some(request.status.as_str()));
    add(Some(&number(request.attempts.into())));
    add(Some(&hex(&request.payload.bytes)));
    add(Some(&request.payload.key_id));
    add(result.map(|sealed| hex(&sealed.bytes)).as_deref());
    add(result.map(|sealed| sealed.key_id.as_str()));
    add(failure.map(|failure| failure.code.as_str()));
    add(failure.map(|failure| failure.message.as_str()));
    add(request.callback_url.as_deref());
    add(Some(&number(request.accepted_at.as_micros())));
    add(Some(&number(request.updated_at.as_micros())));
    let trace = request.trace.as_ref();
    add(trace.map(|trace| trace.parent.to_string()).as_deref());
    add(trace.and_then(|trace| trace.state.as_deref()));
    text
}

/// Returns `None` for any text that [`encode`] does not produce.
pub(super) fn decode(text: &str, id: RequestId) -> Option<Request> {
    let mut fields = FieldReader(text);
    if fields.required()? != VERSION {
        return None;
    }
    let request = Request {
        id,
        tenant: TenantId::parse(fields.required()?).ok()?,
        request_type: RequestType::parse(fields.required()?).ok()?,
        status: RequestStatus::parse(fields.required()?)?,
        attempts: fields.required()?.parse().ok()?,
        payload: Sealed { bytes: unhex(fields.required()?)?, key_id: fields.required()?.to_owned() },
        result: fields.pair(|bytes, key| Some(Sealed { bytes: unhex(bytes)?, key_id: key.to_owned() }))?,
        failure: fields
            .pair(|code, message| Some(Failure { code: code.to_owned(), message: message.to_owned() }))?,
        callback_url: fields.next()?.map(str::to_owned),
        accepted_at: Timestamp::from_micros(fields.required()?.parse().ok()?),
        updated_at: Timestamp::from_micros(fields.required()?.parse().ok()?),
        trace: TraceContext::stored(fields.next()?, fields.next()?),
    };
    fields.0.is_empty().then_some(request)
}

/// Reads fields one after the other; holds the rest of the text.
struct FieldReader<'a>(&'a str);

impl<'a> FieldReader<'a> {
    fn next(&mut self) -> Option<Option<&'a str>> {
        let (length, rest) = self.0.split_once(':')?;
        if length == "-" {
            self.0 = rest;
            return Some(None);
        }
        let (field, rest) = rest.split_at_checked(length.parse().ok()?)?;
        self.0 = rest;
        Some(Some(field))
    }

    fn required(&mut self) -> Option<&'a str> {
        self.next()?
    }

    /// Reads two fields that are either both present or both absent.
    fn pair<T>(&mut self, join: impl FnOnce(&'a str, &'a str) -> Option<T>) -> Option<Option<T>> {
        match (self.next()?, self.next()?) {
            (None, None) => Some(None),
            (Some(first), Some(second)) => join(first, second).map(Some),
            _ => None,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    digits.map(|pair| u8::from_str_radix(pair.filter(|pair| pair.len() == 2)?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn request() -> Request {
        Request {
            id: RequestId::new(Timestamp::from_seconds(1), [7; 10]),
            tenant: TenantId::parse("acme ü").unwrap(),
            request_type: RequestType::parse("pay:ment").unwrap(),
            status: RequestStatus::Completed,
            attempts: 2,
            payload: Sealed { key_id: "a".to_owned(), bytes: vec![0, 255, 16] },
            result: Some(Sealed { key_id: "b".to_owned(), bytes: Vec::new() }),
            failure: Some(Failure { code: "C".to_owned(), message: "1:x\n".to_owned() }),
            callback_url: Some("https://example.com/".to_owned()),
            accepted_at: Timestamp::from_micros(1_700_000_000_123_456),
            updated_at: Timestamp::from_micros(-5),
            trace: TraceContext::stored(Some(TRACEPARENT), Some("a=1,b=2:3")),
        }
    }

    #[test]
    fn a_request_survives_encoding() {
        let whole = request();
        assert_eq!(decode(&encode(&whole), whole.id), Some(whole.clone()));
        let bare = Request { result: None, failure: None, callback_url: None, trace: None, ..whole };
        assert_eq!(decode(&encode(&bare), bare.id), Some(bare));
    }

    #[test]
    fn truncated_text_and_other_versions_are_refused() {
        let (text, id) = (encode(&request()), request().id);
        for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
            assert_eq!(decode(&text[..end], id), None, "{end}");
        }
        assert_eq!(decode(&text.replacen("1:2", "1:1", 1), id), None);
        assert_eq!(decode(&format!("{text}1:x"), id), None);
    }
}
