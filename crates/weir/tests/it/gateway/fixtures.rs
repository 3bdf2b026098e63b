//! A server whose upstream is the test itself.

use http::Method;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};
use weir_testkit::raw_connection::{Listener, RawConnection};

use crate::fixtures::{FAR_FUTURE, Running, Store};

/// Limits that no test reaches: tiers are tested elsewhere.
const HIGH_LIMITS: [(&str, &str); 3] = [
    ("WEIR_RATE_LIMIT_TIERS_FREE_REQUESTS_PER_MINUTE", "1000000"),
    ("WEIR_RATE_LIMIT_TIERS_FREE_BURST_CAPACITY", "1000000"),
    ("WEIR_RATE_LIMIT_TIERS_FREE_DAILY_LIMIT", "1000000"),
];

pub(super) struct TestGateway {
    pub(super) running: Running,
    pub(super) upstream: Listener,
}

impl TestGateway {
    pub(super) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    pub(super) async fn start_with(settings: &[(&str, &str)]) -> Self {
        let upstream = Listener::start().await;
        let url = upstream.url();
        Self::start_at(upstream, &url, settings).await
    }

    /// Starts a server that reaches the upstream by another URL.
    pub(super) async fn start_at(upstream: Listener, url: &str, settings: &[(&str, &str)]) -> Self {
        // One thread, so that all calls share the same idle connections.
        let fixed = [
            ("WEIR_AI_UPSTREAM", url),
            ("WEIR_ROLES", "api"),
            ("WEIR_HTTP_THREADS", "1"),
            ("WEIR_HTTP_ALLOWED_HOSTS", "*"),
        ];
        let settings: Vec<_> = fixed.into_iter().chain(HIGH_LIMITS).chain(settings.iter().copied()).collect();
        let running = Running::start_with(Store::Embedded, &settings).await;
        Self { running, upstream }
    }

    pub(super) fn token(&self) -> String {
        token(&self.running, "a@b.c")
    }

    /// Connects a caller.
    pub(super) async fn caller(&self) -> RawConnection {
        RawConnection::connect(self.running.weir.addr()).await
    }

    /// Connects a caller and sends the head of a request, with a token and these headers.
    pub(super) async fn start_request(&self, line: &str, headers: &[&str]) -> RawConnection {
        let mut caller = self.caller().await;
        caller.send(self.head(line, headers)).await;
        caller
    }

    /// The head of a request, with a token and these headers.
    pub(super) fn head(&self, line: &str, headers: &[&str]) -> String {
        let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let token = self.token();
        format!("{line} HTTP/1.1\r\nHost: gate.example\r\nAuthorization: Bearer {token}\r\n{lines}\r\n")
    }

    pub(super) fn client(&self) -> Client {
        self.running.client().with_header("authorization", &format!("Bearer {}", self.token()))
    }

    /// Starts a call, which runs while the test is its upstream.
    pub(super) fn call(
        &self,
        method: Method,
        path: &'static str,
        body: &'static str,
    ) -> tokio::task::JoinHandle<Response> {
        let client = self.client();
        tokio::spawn(async move { client.request(method, path, &[], body).await.expect("an answer") })
    }
}

pub(super) fn token(running: &Running, user: &str) -> String {
    let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims { sub: user.into(), exp: FAR_FUTURE, tenant_id: None, scope: None };
    jwt::sign(&secret, &claims).unwrap()
}

/// A response with this body.
pub(super) fn answer(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// The status and the code of an error response.
pub(super) fn error(response: &Response) -> (u16, String) {
    let body = response.json();
    assert_eq!(body["status"], response.status, "{body}");
    (response.status, body["code"].as_str().unwrap().to_owned())
}
