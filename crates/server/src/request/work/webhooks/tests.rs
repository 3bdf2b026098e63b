use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::call::{WebhookOutcome, classify, wait};
use super::message;
use crate::outbound::{OutboundError, OutboundResponse};

fn answered(status: u16) -> WebhookOutcome {
    let status = StatusCode::from_u16(status).unwrap();
    classify(Ok(OutboundResponse { status, retry_after: None, body: Bytes::new() }))
}

#[test]
fn a_refusing_receiver_is_not_called_again() {
    for status in [200, 201, 202, 204] {
        assert_eq!(answered(status), WebhookOutcome::Done, "{status}");
    }
    for status in [400, 401, 404, 410, 422] {
        assert!(matches!(answered(status), WebhookOutcome::Dead(_)), "{status}");
    }
    for status in [302, 307, 408, 425, 429, 500, 503] {
        assert!(matches!(answered(status), WebhookOutcome::Retry { .. }), "{status}");
    }
    assert!(matches!(classify(Err(OutboundError::ForbiddenAddress)), WebhookOutcome::Dead(_)));
    assert!(matches!(classify(Err(OutboundError::TimedOut)), WebhookOutcome::Retry { .. }));
}

#[test]
fn waits_double_from_five_seconds_to_an_hour() {
    let near = |wait: Duration, seconds: f64| (wait.as_secs_f64() / seconds - 1.0).abs() <= 0.101;
    for (attempts, seconds) in
        [(0, 5.0), (1, 10.0), (9, 2_560.0), (10, 3_600.0), (11, 3_600.0), (40, 3_600.0)]
    {
        assert!(near(wait(attempts, None), seconds), "{attempts}");
    }
    assert!(near(wait(0, Some(Duration::from_secs(60))), 60.0));
    assert!(near(wait(0, Some(Duration::MAX)), 3_600.0));
}

#[test]
fn a_result_is_sent_as_json_or_else_as_text() {
    let shown = |result: &[u8]| String::from_utf8(message::as_json(result)).unwrap();
    assert_eq!(shown(b"{\"a\": 1e400}"), "{\"a\": 1e400}");
    assert_eq!(shown(b"done"), "\"done\"");
    assert_eq!(shown(b"\"\xff\""), "\"\\\"\u{fffd}\\\"\"");
    assert_eq!(shown(b"{} {}"), "\"{} {}\"");
}
