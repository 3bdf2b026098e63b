//! Callbacks of downstreams that answered 202: `POST /v1/requests/{requestId}/callback`.
//!
//! The signature is checked before anything else: without a valid one nobody learns which requests exist. A callback also has
//! to name its request, by `webhook-id` or in its body, both of which are signed: otherwise it could be sent again to another
//! request within the five minutes for which its signature is valid.
//!
//! Ids of callbacks need not be stored, because the first callback makes the request final. Nothing undoes that (only requests
//! whose attempts all failed can be replayed), and the store decides it for all servers. So repeating a callback changes
//! nothing.

use std::sync::Arc;

use axum::extract::State;
use bytes::Bytes;
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use weir_core::RequestId;
use weir_core::request::state::{Callback, TransitionError};
use weir_core::webhook::SignedMessage;
use weir_store::request::{CallbackOutcome, Failure};

use super::parse_id;
use crate::app::App;
use crate::http::body::{Json, Raw, parse_json};
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::request::service::DownstreamCallback;

const CODE_MAX: usize = 64;
const MESSAGE_MAX: usize = 1_000;

/// The failure if the downstream names none.
const CODE_DEFAULT: &str = "DOWNSTREAM_FAILED";
const MESSAGE_DEFAULT: &str = "the downstream called back that it failed";

/// The `WWW-Authenticate` header. Standard Webhooks has no registered scheme, so this names its header.
const CHALLENGE: &str = r#"WebhookSignature realm="weir", header="webhook-signature""#;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({
    "requestId": "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "status": "COMPLETED", "result": {"paid": true}
})))]
struct CallbackRequest {
    /// The request that the path names. It may be left out when `webhook-id` names it.
    #[schema(value_type = Option<uuid::Uuid>)]
    request_id: Option<Box<str>>,
    #[schema(value_type = schema::CallbackStatus)]
    status: Box<str>,
    /// With `COMPLETED`: what callers get as `result`, any JSON value.
    #[schema(value_type = Value, required = false)]
    result: Option<Box<RawValue>>,
    /// With `FAILED`: why, for programs; cut off after 64 characters. `DOWNSTREAM_FAILED` when it is left out.
    #[schema(value_type = Option<String>)]
    failure_code: Option<Box<str>>,
    /// With `FAILED`: why, for people; cut off after 1,000 characters.
    #[schema(value_type = Option<String>)]
    failure_message: Option<Box<str>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CallbackResponse {
    request_id: uuid::Uuid,
    #[schema(value_type = schema::RequestStatus)]
    status: &'static str,
}

/// Call back, as a downstream.
///
/// A downstream that answered 202 reports here that it is done. The call is signed as Standard Webhooks
/// (standardwebhooks.com) defines it, with `WEIR_WEBHOOK_SECRET`: HMAC-SHA-256 over `webhook-id`, `webhook-timestamp`
/// and the exact bytes of the body. A signature is valid for five minutes, and for one request: `webhook-id` is its id, or
/// the body names it as `requestId`. Otherwise the answer is 401.
///
/// Sent again, or after the request has become final, it is answered with the request's status and changes nothing.
#[utoipa::path(
    post,
    path = "/v1/requests/{requestId}/callback",
    tag = "request",
    params(
        ("requestId" = uuid::Uuid, Path, description = "Which request: the `requestId` of its 202."),
        (
            "webhook-id" = String, Header,
            description = "The id of the request; or, if the body names the request, any name without a full stop.",
            example = "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10",
        ),
        (
            "webhook-timestamp" = String, Header,
            description = "When it is sent, in whole seconds since 1970.",
            example = "1773457200",
        ),
        (
            "webhook-signature" = String, Header,
            description = "One or more signatures, separated by spaces; one of them must be valid.",
            example = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
    ),
    request_body = CallbackRequest,
    responses(
        (
            status = 200,
            description = "The request's status now: after this call, or since an earlier one.",
            body = CallbackResponse,
        ),
        (status = 404, description = "There is no such request; only callers who can sign learn that."),
        (
            status = 409,
            description = "`REQUEST_NOT_STARTED`: the request was not sent to a downstream yet, so none can be done \
                with it.",
        ),
    ),
)]
pub(crate) async fn call_back(
    State(app): State<Arc<App>>,
    id: PathParam,
    headers: HeaderMap,
    Raw(body): Raw,
) -> Result<Json<CallbackResponse>, ApiError> {
    let webhook_id = check_signature(&app, &headers, &body)?;
    let request: CallbackRequest = parse_json(&body)?;
    let id = parse_id(id)?;
    check_request(id, webhook_id, request.request_id.as_deref())?;
    let callback = parse(request)?;
    let status = match app.requests.call_back(id, callback).await? {
        CallbackOutcome::Applied(status) => status,
        // Repeated or too late: it changes nothing.
        CallbackOutcome::TransitionError(TransitionError::Final(status)) => status,
        CallbackOutcome::TransitionError(_) => return Err(not_started(id)),
        CallbackOutcome::Unknown => {
            return Err(ApiError::not_found(format!("There is no request with the id {id}")));
        }
    };
    Ok(Json(CallbackResponse { request_id: *id.as_uuid(), status: status.as_str() }))
}

/// Verifies the signature and returns the message's id.
fn check_signature<'a>(app: &App, headers: &'a HeaderMap, body: &Bytes) -> Result<&'a str, ApiError> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(id), Some(timestamp), Some(signatures)) =
        (header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"))
    else {
        let message = "A callback must be signed: the headers webhook-id, webhook-timestamp and webhook-signature \
                       must be there, as Standard Webhooks has them";
        return Err(ApiError::unauthenticated(message, CHALLENGE));
    };
    let message = SignedMessage { id, timestamp, signatures, body };
    app.auth.webhook.verify_callback(message, app.requests.now()).map_err(|problem| {
        let advice = "sign the exact bytes of the body with WEIR_WEBHOOK_SECRET, within five minutes";
        let message = format!("The callback's signature is not valid: {problem}; {advice}");
        ApiError::unauthenticated(message, CHALLENGE)
    })?;
    Ok(id)
}

/// Checks that a callback was signed for this request: by the id in the body, if there is one, else by the message's id.
fn check_request(id: RequestId, webhook_id: &str, in_body: Option<&str>) -> Result<(), ApiError> {
    if RequestId::parse(in_body.unwrap_or(webhook_id)) == Some(id) {
        return Ok(());
    }
    let advice = "put the id of the request into webhook-id, or into the body as requestId, and sign that";
    let message = format!("The callback was not signed for the request {id}; {advice}");
    Err(ApiError::unauthenticated(message, CHALLENGE))
}

fn parse(request: CallbackRequest) -> Result<DownstreamCallback, ApiError> {
    let CallbackRequest { status, result, failure_code, failure_message, .. } = request;
    match &*status {
        "COMPLETED" => {
            let result = result.map(|result| Bytes::from(Box::<str>::from(result).into_boxed_bytes()));
            Ok(DownstreamCallback { callback: Callback::Completed, result, failure: None })
        }
        "FAILED" => {
            let text = |value: Option<Box<str>>, default: &str, max: usize| {
                let value = value.map(|text| sanitize(&text, max)).filter(|text| !text.is_empty());
                value.unwrap_or_else(|| default.to_owned())
            };
            let failure = Failure {
                code: text(failure_code, CODE_DEFAULT, CODE_MAX),
                message: text(failure_message, MESSAGE_DEFAULT, MESSAGE_MAX),
            };
            Ok(DownstreamCallback { callback: Callback::Failed, result: None, failure: Some(failure) })
        }
        _ => Err(ApiError::invalid_field("status", "must be COMPLETED or FAILED")),
    }
}

/// Cuts a text and replaces control characters, which logs and databases cannot store. Refusing the callback would only keep
/// the request open.
fn sanitize(text: &str, max: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(max).collect::<String>().trim().to_owned()
}

fn not_started(id: RequestId) -> ApiError {
    let message = format!("The request {id} was not sent to a downstream yet; call back after it was");
    ApiError::conflict("REQUEST_NOT_STARTED", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callback_names_its_request_in_its_body_or_by_its_id() {
        let (own, other) = ("019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e11");
        let id = RequestId::parse(own).unwrap();
        for (webhook_id, in_body) in [(own, None), ("msg_1", Some(own)), (own, Some(own)), (other, Some(own))]
        {
            assert!(check_request(id, webhook_id, in_body).is_ok(), "{webhook_id} {in_body:?}");
        }
        for (webhook_id, in_body) in
            [("msg_1", None), (other, None), ("msg_1", Some(other)), (own, Some(other))]
        {
            assert!(check_request(id, webhook_id, in_body).is_err(), "{webhook_id} {in_body:?}");
        }
    }

    #[test]
    fn long_texts_of_a_downstream_are_cut_rather_than_refused() {
        assert_eq!(sanitize("a\0b\nc", 10), "a b c");
        assert_eq!(sanitize(&"ü".repeat(20), 10), "ü".repeat(10));
        let callback = parse(CallbackRequest {
            request_id: None,
            status: "FAILED".into(),
            result: None,
            failure_code: Some("\n".into()),
            failure_message: None,
        });
        let failure = callback.ok().and_then(|callback| callback.failure).unwrap();
        assert_eq!((failure.code.as_str(), failure.message.as_str()), (CODE_DEFAULT, MESSAGE_DEFAULT));
    }
}
