//! The body of a webhook.

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::IgnoredAny;
use weir_core::request::state::RequestStatus;
use weir_queue::rfc3339;
use weir_store::request::Request;

/// Everything but the result, which is inserted unchanged.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Data<'a> {
    request_id: String,
    status: &'static str,
    failure_code: Option<&'a str>,
    failure_message: Option<&'a str>,
    attempts: u32,
    accepted_at: jiff::Timestamp,
    updated_at: jiff::Timestamp,
}

/// The body: the event, its time, and the request as `GET /v1/requests/{requestId}` shows it, with its decrypted failure message
/// and result.
pub(super) fn encode(request: &Request, failure_message: Option<&str>, result: Option<&[u8]>) -> Bytes {
    let kind = match request.status {
        RequestStatus::Completed => "request.completed",
        _ => "request.failed",
    };
    let (failure, updated_at) = (request.failure.as_ref(), rfc3339(request.updated_at));
    let data = Data {
        request_id: request.id.to_string(),
        status: request.status.as_str(),
        failure_code: failure.map(|failure| failure.code.as_str()),
        failure_message,
        attempts: request.attempts,
        accepted_at: rfc3339(request.accepted_at),
        updated_at,
    };
    // Texts and numbers always become JSON.
    let data = serde_json::to_string(&data).unwrap_or_default();
    let open = data.strip_suffix('}').unwrap_or(&data);
    let result = result.map_or_else(|| b"null".to_vec(), as_json);
    let mut body = BytesMut::with_capacity(data.len() + result.len() + 96);
    let head = format!(r#"{{"type":"{kind}","timestamp":"{updated_at}","data":{open},"result":"#);
    body.put_slice(head.as_bytes());
    body.put_slice(&result);
    body.put_slice(b"}}");
    body.freeze()
}

/// A result as JSON: unchanged if it is JSON, else as a string.
pub(super) fn as_json(result: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(result);
    // The parser skips strings without checking their UTF-8, so that is checked first.
    let is_text = matches!(text, std::borrow::Cow::Borrowed(_));
    if is_text && serde_json::from_str::<IgnoredAny>(&text).is_ok() {
        return result.to_vec();
    }
    serde_json::Value::from(text).to_string().into_bytes()
}
