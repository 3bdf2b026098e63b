//! Calls whose bodies are still coming, or which ask something of their connection: hyper's client makes them.

use axum::body::{Body, HttpBody};
use axum::response::Response;
use http::header::{CONNECTION, CONTENT_LENGTH, TE, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;

use super::download::{Around, Download};
use super::upload::{Fault, Progress, Upload};
use super::upstream::Upstream;
use super::wire::Wire;
use super::{Behalf, Payload, Problem, Proxy, headers, tunnel, unasked};

impl Proxy {
    /// Passes a call on, and answers with what comes back.
    pub(super) async fn pass_on_by_hyper(
        &self,
        upstream: &Upstream,
        behalf: Behalf<'_>,
        mut request: Request<Payload>,
    ) -> Result<Response, Problem> {
        let upgrade = headers::wants_websocket(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (parts, payload) = request.into_parts();
        let (upload, progress) = Upload::new(payload.into_body(), self.settings.max_body, self.read_timeout);
        let request = self.request(upstream, behalf, parts, upload, upgrade.is_some());
        let exchange = Box::pin(upstream.exchange(request));
        let answered = self.wait(exchange, behalf.caller, &progress).await;
        let (response, wire) = answered.map_err(|problem| blame(problem, &progress))?;
        let around = Around {
            pool: upstream.pool.clone(),
            caller: behalf.caller.cloned(),
            upload: progress,
            idle_timeout: self.settings.idle_timeout,
            stop: self.stop.clone(),
        };
        self.respond(response, wire, around, upgrade)
    }

    /// The call as the upstream gets it.
    fn request(
        &self,
        upstream: &Upstream,
        behalf: Behalf<'_>,
        mut parts: Parts,
        upload: Upload,
        is_upgrade: bool,
    ) -> Request<Upload> {
        let takes_trailers = headers::takes_trailers(&parts.headers);
        let had_length = parts.headers.contains_key(CONTENT_LENGTH);
        headers::strip(&mut parts.headers);
        let addition = self.addition(upstream, behalf);
        addition.apply(&mut parts.headers, &parts.uri);
        if is_upgrade {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        } else if takes_trailers {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("te"));
            parts.headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        frame(&mut parts.headers, &upload, had_length);
        let path = parts.uri.path_and_query().cloned();
        parts.uri = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        Request::from_parts(parts, upload)
    }

    /// The answer as the caller gets it.
    fn respond(
        &self,
        response: http::Response<Incoming>,
        mut wire: Box<Wire>,
        around: Around,
        upgrade: Option<OnUpgrade>,
    ) -> Result<Response, Problem> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(inbound) = upgrade else {
                return Err(unasked());
            };
            let open = self.metrics.tunnels.clone();
            let tunnel =
                tunnel::Tunnel { wire, inbound, open, idle_timeout: around.idle_timeout, stop: around.stop };
            return tunnel.open(response, &self.tunnels);
        }
        let (mut parts, body) = response.into_parts();
        let is_encoded = parts.headers.contains_key(TRANSFER_ENCODING);
        let lengths = parts.headers.get_all(CONTENT_LENGTH).iter().map(|length| length != "0");
        wire.is_doubtful = headers::is_doubtful(parts.status, is_encoded, lengths.reduce(|a, b| a || b));
        if is_encoded {
            parts.headers.remove(CONTENT_LENGTH);
        }
        headers::settle_length(&mut parts.headers);
        headers::strip(&mut parts.headers);
        parts.version = Version::HTTP_11;
        Ok(Response::from_parts(parts, Body::new(Download::new(body, wire, around))))
    }
}

/// Says how long the body is, or that nobody knows.
fn frame(headers: &mut HeaderMap, upload: &Upload, had_length: bool) {
    match upload.size_hint().exact() {
        Some(0) if !had_length => {}
        Some(length) => {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
}

/// What the caller did wrong comes before what became of it.
fn blame(problem: Problem, upload: &Progress) -> Problem {
    match upload.fault() {
        Some(Fault::TooLarge) => Problem::TooLarge,
        Some(Fault::TooSlow) => Problem::TooSlow,
        Some(Fault::CutOff) => Problem::BodyCutOff,
        None => problem,
    }
}
