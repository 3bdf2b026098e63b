//! Every route of the table, called by those who must not get in and by those who must.
//!
//! The table says what a route asks for; what follows from that is tried on the running server. A new route is covered by
//! its line, or has to be entered in [`NOT_COVERED`].

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Method;
use serde_json::{Value, json};
use weir_core::request::Scope;
use weir_server::auth::credentials::Credentials;
use weir_server::auth::jwt::{self, Claims};
use weir_server::http::route::{ErrorFormat, Route};
use weir_server::routes::routes;
use weir_testkit::http::{Client, Response};
use weir_testkit::wait;

use crate::fixtures::{PATIENCE, Running, Store};

/// Far in the future, in seconds since 1970.
const FAR: u64 = 4_000_000_000;
/// An id that nothing has.
const NOBODY: &str = "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10";

/// Routes that let in whoever asks, or whom this test cannot let in, and why.
const NOT_COVERED: [(&str, &str); 24] = [
    ("POST /api/config", "quota has no callers of its own: networks keep strangers out"),
    ("GET /api/config/{userId}", "quota has no callers of its own"),
    ("DELETE /api/config/{userId}", "quota has no callers of its own"),
    ("POST /api/send", "quota has no callers of its own"),
    ("POST /api/v1/slots", "slot has no callers of its own: networks keep strangers out"),
    ("POST /api/v1/slots/bulk", "slot has no callers of its own"),
    ("POST /api/v1/slots/forecast", "slot has no callers of its own"),
    ("GET /api/v1/slots/windows", "slot has no callers of its own"),
    ("GET /api/v1/slots/{eventId}", "slot has no callers of its own"),
    ("DELETE /api/v1/slots/{eventId}", "slot has no callers of its own"),
    (
        "POST /v1/requests/{requestId}/callback",
        "signed over its body; request/callback.rs has good signatures",
    ),
    ("GET /api/v1/sales", "shoppers have no credentials"),
    ("GET /api/v1/sales/events", "shoppers have no credentials"),
    ("POST /api/v1/purchases", "shoppers name themselves in X-User-Id"),
    ("GET /api/v1/purchases", "shoppers name themselves in X-User-Id"),
    ("GET /health", "probes and dashboards have no credentials"),
    ("GET /livez", "probes have no credentials"),
    ("GET /readyz", "probes have no credentials"),
    ("GET /readyz/{capability}", "probes have no credentials"),
    ("GET /metrics", "Prometheus has no credentials"),
    ("GET /openapi.json", "says what credentials are for"),
    ("GET /docs", "a page"),
    ("GET /", "a page"),
    ("GET /sale/…", "the sale page and its files"),
];

/// A server, and what its callers may show.
struct Gate {
    running: Running,
    secret: String,
    admin_key: String,
}

/// What a caller shows, and how it is refused.
struct Attempt {
    what: String,
    header: Option<(&'static str, String)>,
    status: u16,
}

impl Gate {
    async fn open() -> Self {
        let running = Running::start(Store::Embedded).await;
        let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
        let admin_key = running.weir.admin_key();
        Self { running, secret, admin_key }
    }

    fn token(&self, tenant: Option<&str>, scope: Option<&str>) -> String {
        self.signed(&self.secret, FAR, tenant, scope)
    }

    fn signed(&self, secret: &str, exp: u64, tenant: Option<&str>, scope: Option<&str>) -> String {
        let [tenant_id, scope] = [tenant, scope].map(|text| text.map(str::to_owned));
        let claims = Claims { sub: "a@b.c".into(), exp, tenant_id, scope };
        format!("Bearer {}", jwt::sign(secret, &claims).unwrap())
    }

    /// Tokens that look right and are not.
    fn bad_tokens(&self, scope: Option<&str>) -> Vec<(String, String)> {
        let good = self.token(Some("acme"), scope);
        let (unsigned, _) = good.rsplit_once('.').unwrap();
        let (_, claims) = unsigned.rsplit_once('.').unwrap();
        let none = URL_SAFE_NO_PAD.encode(br#"{"alg":"none","typ":"JWT"}"#);
        let other = "another secret of at least 32 bytes";
        [
            ("an expired token", self.signed(&self.secret, 1_000_000_000, Some("acme"), scope)),
            ("a token signed by somebody else", self.signed(other, FAR, Some("acme"), scope)),
            ("a token without its signature", format!("{unsigned}.")),
            ("a token that says it needs no signature", format!("Bearer {none}.{claims}.")),
            ("a token in another scheme", good.replace("Bearer", "Basic")),
            ("no token at all", "Bearer".to_owned()),
            ("nonsense", "Bearer a.b.c".to_owned()),
        ]
        .map(|(what, token)| (what.to_owned(), token))
        .to_vec()
    }

    /// Everything that must not do on a route.
    fn attempts(&self, credentials: Credentials) -> Vec<Attempt> {
        let (scope, takes_key) = match credentials {
            Credentials::Open => return Vec::new(),
            Credentials::Operator => (None, true),
            Credentials::OperatorOrScope(scope) => (Some(scope), true),
            Credentials::Token | Credentials::Signature => (None, false),
            Credentials::Tenant(scope) => (Some(scope.as_str()), false),
        };
        let refused = |status| move |what: &str, header| Attempt { what: what.to_owned(), header, status };
        let (unknown, forbidden) = (refused(401), refused(403));
        let mut attempts = vec![
            unknown("nothing", None),
            unknown("a wrong key", Some(("x-admin-key", format!("{}x", self.admin_key)))),
            unknown("an empty key", Some(("x-admin-key", String::new()))),
        ];
        if !takes_key {
            attempts.push(unknown("the operator's key", Some(("x-admin-key", self.admin_key.clone()))));
        }
        for (what, token) in self.bad_tokens(scope) {
            attempts.push(unknown(&what, Some(("authorization", token))));
        }
        let scopes = scopes();
        let others: Vec<&str> = scopes.iter().copied().filter(|other| Some(*other) != scope).collect();
        match credentials {
            Credentials::Operator | Credentials::Signature => {
                let all = self.token(Some("acme"), Some(&others.join(" ")));
                attempts.push(unknown("a token with every scope", Some(("authorization", all))));
            }
            Credentials::OperatorOrScope(_) | Credentials::Tenant(_) => {
                for other in others.iter().map(|other| Some(*other)).chain([None, Some("")]) {
                    let token = self.token(Some("acme"), other);
                    attempts.push(forbidden(&format!("the scope {other:?}"), Some(("authorization", token))));
                }
            }
            Credentials::Open | Credentials::Token => {}
        }
        if matches!(credentials, Credentials::Tenant(_)) {
            for tenant in [None, Some("")] {
                let token = self.token(tenant, scope);
                attempts.push(forbidden(&format!("the tenant {tenant:?}"), Some(("authorization", token))));
            }
        }
        attempts
    }

    /// Everything that must do.
    fn passes(&self, credentials: Credentials) -> Vec<(&'static str, String)> {
        let key = || ("x-admin-key", self.admin_key.clone());
        let token = |tenant, scope| ("authorization", self.token(tenant, scope));
        match credentials {
            Credentials::Open | Credentials::Signature => Vec::new(),
            Credentials::Operator => vec![key()],
            Credentials::OperatorOrScope(scope) => vec![key(), token(None, Some(scope))],
            Credentials::Token => vec![token(None, None)],
            Credentials::Tenant(scope) => vec![token(Some("acme"), Some(scope.as_str()))],
        }
    }

    async fn call(
        &self,
        method: &Method,
        path: &str,
        header: Option<(&str, &str)>,
        body: &Value,
    ) -> Response {
        let has_body = matches!(*method, Method::POST | Method::PUT);
        let mut headers: Vec<(&str, &str)> = header.into_iter().collect();
        headers.extend(has_body.then_some(("content-type", "application/json")));
        let body = if has_body { body.to_string() } else { String::new() };
        self.running.client().request(method.clone(), path, &headers, body).await.unwrap()
    }
}

/// Every scope that any route asks for, and one that none does.
fn scopes() -> BTreeSet<&'static str> {
    let of_routes = routes().into_iter().filter_map(|route| match route.credentials {
        Credentials::OperatorOrScope(scope) => Some(scope),
        Credentials::Tenant(scope) => Some(scope.as_str()),
        _ => None,
    });
    of_routes.chain(["openid"]).collect()
}

/// The methods that a route is called with here.
fn methods(route: &Route) -> Vec<Method> {
    route
        .method
        .clone()
        .map_or_else(|| vec![Method::GET, Method::POST, Method::DELETE], |method| vec![method])
}

/// The path of a route, with a value for each parameter.
fn path(route: &Route, value: &str) -> String {
    let mut path = String::new();
    for segment in route.path.split_inclusive('/') {
        match segment.strip_prefix('{') {
            Some(rest) => path.extend([value, if rest.ends_with('/') { "/" } else { "" }]),
            None => path.push_str(segment),
        }
    }
    path
}

/// Checks that a refusal has the form that the table promises.
fn check_refusal(route: &Route, response: &Response, at: &str) {
    let body = response.json();
    let code = match route.errors {
        ErrorFormat::Flat => {
            let fields: BTreeSet<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(fields, BTreeSet::from(["status", "error", "code", "message", "timestamp"]), "{at}");
            assert_eq!(body["status"], response.status, "{at}");
            if response.status == 401 { "UNAUTHENTICATED" } else { "UNAUTHORIZED_SCOPE" }
        }
        ErrorFormat::Sale => {
            assert_eq!(body["success"], false, "{at}");
            "UNAUTHORIZED"
        }
    };
    if response.status == 401 {
        let challenge = response.header("www-authenticate").unwrap_or_else(|| panic!("{at}: no challenge"));
        let (takes_token, takes_key) = match route.credentials {
            Credentials::Operator => (false, true),
            Credentials::OperatorOrScope(_) => (true, true),
            Credentials::Token | Credentials::Tenant(_) => (true, false),
            Credentials::Open | Credentials::Signature => (false, false),
        };
        assert_eq!(challenge.contains("Bearer"), takes_token, "{at}: {challenge}");
        assert_eq!(challenge.contains("X-Admin-Key"), takes_key, "{at}: {challenge}");
    }
    let told = if route.errors == ErrorFormat::Flat { &body["code"] } else { &body["error"]["code"] };
    assert_eq!(told, code, "{at}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_gets_in_without_what_the_table_asks_for() {
    let gate = Gate::open().await;
    let mut count = 0;
    for route in routes() {
        for method in methods(&route) {
            for Attempt { what, header, status } in gate.attempts(route.credentials) {
                let header = header.as_ref().map(|(name, value)| (*name, value.as_str()));
                // A body that would be refused: credentials are looked at first.
                let response = gate.call(&method, &path(&route, NOBODY), header, &json!([])).await;
                let at = format!("{route:?} called with {method} and {what}");
                assert_eq!(response.status, status, "{at}: {:?}", response.body);
                check_refusal(&route, &response, &at);
                count += 1;
            }
        }
    }
    assert!(count > 500, "{count}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_credentials_are_let_in() {
    let gate = Gate::open().await;
    for route in routes() {
        for method in methods(&route) {
            for (name, value) in gate.passes(route.credentials) {
                let response =
                    gate.call(&method, &path(&route, NOBODY), Some((name, value.as_str())), &json!({})).await;
                let status = response.status;
                assert!(
                    !matches!(status, 401 | 403 | 500..),
                    "{route:?} called with {method}, {name}: {status}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_belongs_to_a_tenant_does_not_exist_for_another() {
    let gate = Gate::open().await;
    let submission = json!({"idempotencyKey": "k", "requestType": "payment", "payload": 1});
    let own = |scope: Scope| gate.token(Some("acme"), Some(scope.as_str()));
    let (create, read) = (own(Scope::Create), own(Scope::Read));
    let bearing = |token: &str| gate.running.client().with_header("authorization", token);
    let id = submit(&bearing(&create), &submission).await;
    let at = format!("/v1/requests/{id}");
    wait::until("it is final", PATIENCE, async || {
        bearing(&read).get(&at).await.unwrap().json()["status"] == "COMPLETED"
    })
    .await;
    for route in routes() {
        let Credentials::Tenant(scope) = route.credentials else { continue };
        let method = route.method.clone().unwrap();
        let other = gate.token(Some("rival"), Some(scope.as_str()));
        let header = Some(("authorization", other.as_str()));
        match (&method, route.path) {
            (_, path_of_one) if path_of_one.contains("{requestId}") => {
                let path = path(&route, &id);
                let response = gate.call(&method, &path, header, &json!({})).await;
                assert_eq!(
                    (response.status, &response.json()["code"]),
                    (404, &json!("NOT_FOUND")),
                    "{route:?}"
                );
                let owner = own(scope);
                let header = Some(("authorization", owner.as_str()));
                assert_eq!(gate.call(&method, &path, header, &json!({})).await.status, 200, "{route:?}");
            }
            (&Method::GET, "/v1/requests") => {
                let list = gate.call(&method, route.path, header, &json!({})).await;
                let items = list.json()["items"].as_array().unwrap().clone();
                assert!(items.iter().all(|item| item["requestId"] != id.as_str()), "{items:?}");
            }
            (&Method::POST, "/v1/requests") => {
                assert_ne!(submit(&bearing(&other), &submission).await, id, "keys are the tenant's own");
            }
            (&Method::GET, "/v1/webhook-secret") => {
                let owner = own(scope);
                let theirs = gate.call(&method, route.path, header, &json!({})).await.json();
                let header = Some(("authorization", owner.as_str()));
                assert_ne!(gate.call(&method, route.path, header, &json!({})).await.json(), theirs);
            }
            _ => panic!("{route:?}: say here how it keeps other tenants out"),
        }
    }
}

async fn submit(client: &Client, submission: &Value) -> String {
    let response = client.post("/v1/requests", submission).await.unwrap();
    assert_eq!(response.status, 202, "{:?}", response.body);
    response.json()["requestId"].as_str().unwrap().to_owned()
}

#[test]
fn the_list_of_routes_that_are_not_covered_is_what_the_table_says() {
    let is_not_covered =
        |route: &Route| matches!(route.credentials, Credentials::Open | Credentials::Signature);
    let not_covered: BTreeSet<String> = routes()
        .into_iter()
        .filter(is_not_covered)
        .map(|route| {
            let method = route.method.map_or_else(|| "ANY".to_owned(), |method| method.to_string());
            let path = if route.is_page { "/sale/…" } else { route.path };
            format!("{method} {path}")
        })
        .collect();
    let listed: BTreeSet<String> = NOT_COVERED.map(|(route, _)| route.to_owned()).into();
    assert_eq!(listed, not_covered, "NOT_COVERED has to name each such route, and no other, with a reason");
    assert!(NOT_COVERED.iter().all(|(_, reason)| reason.len() > 5));
}
