//! Calls every route of the table with credentials that must be refused and with credentials that must be accepted.
//!
//! The route table names the required credentials; the tests derive the attempts from them. A new route is covered by its entry
//! in the table, or must be listed in [`NOT_COVERED`].

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Method;
use serde_json::{Value, json};
use weir_core::request::Scope;
use weir_server::auth::credentials::{ADMIN, ADMIN_READ, Credentials};
use weir_server::auth::jwt::{self, Claims};
use weir_server::http::route::{ErrorFormat, Route};
use weir_server::routes::routes;
use weir_testkit::http::{Client, Response};
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, InProcess, Running, Store, TEST_TIMEOUT};

/// An expiry far in the future, in seconds since 1970.
/// An id that does not exist.
const UNKNOWN_ID: &str = "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10";

/// Routes that require no credentials, or for which this test cannot create them, and the reason.
const NOT_COVERED: [(&str, &str); 12] = [
    (
        "POST /v1/requests/{requestId}/callback",
        "signed over its body; request/callback.rs tests valid signatures",
    ),
    ("GET /api/v1/sales", "shoppers have no credentials"),
    ("GET /api/v1/sales/events", "shoppers have no credentials"),
    ("GET /health", "probes and dashboards have no credentials"),
    ("GET /livez", "probes have no credentials"),
    ("GET /readyz", "probes have no credentials"),
    ("GET /readyz/{capability}", "probes have no credentials"),
    ("GET /metrics", "Prometheus has no credentials"),
    ("GET /openapi.json", "describes the credentials"),
    ("GET /docs", "a page"),
    ("GET /", "a page"),
    ("GET /sale/…", "the sale page and its files, and those of the console"),
];

/// A server and the credentials that it accepts.
struct Fixture {
    running: Running,
    secret: String,
    admin_key: String,
}

/// A call that must be refused, and the expected status.
struct Attempt {
    name: String,
    header: Option<(&'static str, String)>,
    status: u16,
}

impl Fixture {
    async fn start() -> Self {
        // Even on a loopback address quota and slot then require credentials, and buyers tokens.
        let settings = [("WEIR_ALLOW_ANONYMOUS", "false"), ("WEIR_SALE_IDENTITY", "token")];
        let running = Running::start_with(Store::Embedded, &settings).await;
        let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
        let admin_key = running.weir.admin_key();
        Self { running, secret, admin_key }
    }

    fn token(&self, tenant: Option<&str>, scope: Option<&str>) -> String {
        self.signed(&self.secret, FAR_FUTURE, tenant, scope)
    }

    fn signed(&self, secret: &str, exp: u64, tenant: Option<&str>, scope: Option<&str>) -> String {
        let [tenant_id, scope] = [tenant, scope].map(|text| text.map(str::to_owned));
        let claims = Claims { sub: "a@b.c".into(), exp, tenant_id, scope };
        format!("Bearer {}", jwt::sign(secret, &claims).unwrap())
    }

    /// Invalid tokens with their names.
    fn bad_tokens(&self, scope: Option<&str>) -> Vec<(String, String)> {
        let valid = self.token(Some("acme"), scope);
        let (unsigned, _) = valid.rsplit_once('.').unwrap();
        let (_, claims) = unsigned.rsplit_once('.').unwrap();
        let none = URL_SAFE_NO_PAD.encode(br#"{"alg":"none","typ":"JWT"}"#);
        let other = "another secret of at least 32 bytes";
        [
            ("an expired token", self.signed(&self.secret, 1_000_000_000, Some("acme"), scope)),
            ("a token signed with another secret", self.signed(other, FAR_FUTURE, Some("acme"), scope)),
            ("a token without its signature", format!("{unsigned}.")),
            ("a token with the algorithm none", format!("Bearer {none}.{claims}.")),
            ("a token in another scheme", valid.replace("Bearer", "Basic")),
            ("no token at all", "Bearer".to_owned()),
            ("nonsense", "Bearer a.b.c".to_owned()),
        ]
        .map(|(name, token)| (name.to_owned(), token))
        .to_vec()
    }

    /// The calls that a route must refuse.
    fn attempts(&self, credentials: Credentials, method: &Method) -> Vec<Attempt> {
        let (scope, takes_operators) = match credentials {
            Credentials::Open => return Vec::new(),
            Credentials::Operator => (None, true),
            Credentials::OperatorOrScope(scope) | Credentials::AnonymousOrScope(scope) => (Some(scope), true),
            Credentials::Token | Credentials::Buyer | Credentials::Signature => (None, false),
            Credentials::Tenant(scope) => (Some(scope.as_str()), false),
        };
        let refused = |status| move |name: &str, header| Attempt { name: name.to_owned(), header, status };
        let (unknown, forbidden) = (refused(401), refused(403));
        let mut attempts = vec![
            unknown("no credentials", None),
            unknown("a wrong key", Some(("x-admin-key", format!("{}x", self.admin_key)))),
            unknown("an empty key", Some(("x-admin-key", String::new()))),
        ];
        if !takes_operators {
            attempts.push(unknown("the operator's key", Some(("x-admin-key", self.admin_key.clone()))));
        }
        for (name, token) in self.bad_tokens(scope.or(Some(ADMIN))) {
            attempts.push(unknown(&name, Some(("authorization", token))));
        }
        let mut others: Vec<&str> = scopes().into_iter().filter(|other| Some(*other) != scope).collect();
        if takes_operators && *method != Method::GET {
            others.push(ADMIN_READ);
        }
        match credentials {
            Credentials::Signature => {
                let all = self.token(Some("acme"), Some(&others.join(" ")));
                attempts.push(unknown("a token with every scope", Some(("authorization", all))));
            }
            Credentials::Operator
            | Credentials::OperatorOrScope(_)
            | Credentials::AnonymousOrScope(_)
            | Credentials::Tenant(_) => {
                if !takes_operators {
                    others.extend([ADMIN, ADMIN_READ]);
                }
                for other in others.iter().map(|other| Some(*other)).chain([None, Some("")]) {
                    let token = self.token(Some("acme"), other);
                    attempts.push(forbidden(&format!("the scope {other:?}"), Some(("authorization", token))));
                }
                let all = self.token(Some("acme"), Some(&others.join(" ")));
                attempts.push(forbidden("every other scope", Some(("authorization", all))));
            }
            Credentials::Open | Credentials::Token | Credentials::Buyer => {}
        }
        if matches!(credentials, Credentials::Tenant(_)) {
            for tenant in [None, Some("")] {
                let token = self.token(tenant, scope);
                attempts.push(forbidden(&format!("the tenant {tenant:?}"), Some(("authorization", token))));
            }
        }
        attempts
    }

    /// The credentials that a route must accept.
    fn accepted(&self, credentials: Credentials, method: &Method) -> Vec<(&'static str, String)> {
        let token = |tenant, scope| ("authorization", self.token(tenant, scope));
        let operators = || {
            let read = (*method == Method::GET).then(|| token(None, Some(ADMIN_READ)));
            [("x-admin-key", self.admin_key.clone()), token(None, Some(ADMIN))].into_iter().chain(read)
        };
        match credentials {
            Credentials::Open | Credentials::Signature => Vec::new(),
            Credentials::Operator => operators().collect(),
            Credentials::OperatorOrScope(scope) | Credentials::AnonymousOrScope(scope) => {
                operators().chain([token(None, Some(scope))]).collect()
            }
            Credentials::Token | Credentials::Buyer => vec![token(None, None)],
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

/// Every scope that a route requires, except those of operators, and some that none requires.
fn scopes() -> BTreeSet<&'static str> {
    let of_routes = routes().into_iter().filter_map(|route| match route.credentials {
        Credentials::OperatorOrScope(scope) | Credentials::AnonymousOrScope(scope) => Some(scope),
        Credentials::Tenant(scope) => Some(scope.as_str()),
        _ => None,
    });
    of_routes.chain(["openid", "ADMIN", "admin:write", "administrator"]).collect()
}

/// The methods with which a route is called here.
fn methods(route: &Route) -> Vec<Method> {
    route
        .method
        .clone()
        .map_or_else(|| vec![Method::GET, Method::POST, Method::DELETE], |method| vec![method])
}

/// The path of a route with `value` for each parameter.
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

/// Checks that a refusal has the error format of its route.
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
            if response.status == 401 { "UNAUTHORIZED" } else { "FORBIDDEN" }
        }
    };
    if response.status == 401 {
        let challenge = response.header("www-authenticate").unwrap_or_else(|| panic!("{at}: no challenge"));
        let (takes_token, takes_key) = match route.credentials {
            Credentials::Operator | Credentials::OperatorOrScope(_) | Credentials::AnonymousOrScope(_) => {
                (true, true)
            }
            Credentials::Token | Credentials::Buyer | Credentials::Tenant(_) => (true, false),
            Credentials::Open | Credentials::Signature => (false, false),
        };
        assert_eq!(challenge.contains("Bearer"), takes_token, "{at}: {challenge}");
        assert_eq!(challenge.contains("X-Admin-Key"), takes_key, "{at}: {challenge}");
    }
    let actual = if route.errors == ErrorFormat::Flat { &body["code"] } else { &body["error"]["code"] };
    assert_eq!(actual, code, "{at}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_without_the_required_credentials_are_refused() {
    let fixture = Fixture::start().await;
    let mut count = 0;
    for route in routes() {
        for method in methods(&route) {
            for Attempt { name, header, status } in fixture.attempts(route.credentials, &method) {
                let header = header.as_ref().map(|(name, value)| (*name, value.as_str()));
                // The body is invalid, too: credentials are checked first.
                let response = fixture.call(&method, &path(&route, UNKNOWN_ID), header, &json!([])).await;
                let at = format!("{route:?} called with {method} and {name}");
                assert_eq!(response.status, status, "{at}: {:?}", response.body);
                check_refusal(&route, &response, &at);
                count += 1;
            }
        }
    }
    assert!(count > 500, "{count}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_the_required_credentials_are_accepted() {
    let fixture = Fixture::start().await;
    for route in routes() {
        for method in methods(&route) {
            for (name, value) in fixture.accepted(route.credentials, &method) {
                let header = Some((name, value.as_str()));
                // The stream would not end. The router treats HEAD as GET.
                let method = if route.path == "/admin/live" { Method::HEAD } else { method.clone() };
                let response = fixture.call(&method, &path(&route, UNKNOWN_ID), header, &json!({})).await;
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
async fn quota_and_slot_are_closed_on_the_network_unless_anonymous_callers_are_allowed() {
    let (local, network) = (("WEIR_LISTEN", "127.0.0.1:0"), ("WEIR_LISTEN", "0.0.0.0:0"));
    for (settings, is_open) in [
        (vec![local], true),
        (vec![network], false),
        (vec![network, ("WEIR_ALLOW_ANONYMOUS", "true")], true),
        (vec![local, ("WEIR_ALLOW_ANONYMOUS", "false")], false),
    ] {
        let server = InProcess::start_with(Store::Embedded, &settings).await;
        let mut count = 0;
        for route in routes() {
            let Credentials::AnonymousOrScope(_) = route.credentials else { continue };
            let headers = [("content-type", "application/json")];
            let method = route.method.clone().unwrap();
            let response =
                server.client.request(method, &path(&route, UNKNOWN_ID), &headers, "{}").await.unwrap();
            assert_eq!(response.status != 401, is_open, "{route:?} with {settings:?}: {}", response.status);
            count += 1;
        }
        assert!(count >= 10, "{count}");
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenants_requests_do_not_exist_for_another() {
    let fixture = Fixture::start().await;
    let submission = json!({"idempotencyKey": "k", "requestType": "payment", "payload": 1});
    let own = |scope: Scope| fixture.token(Some("acme"), Some(scope.as_str()));
    let (create, read) = (own(Scope::Create), own(Scope::Read));
    let bearing = |token: &str| fixture.running.client().with_header("authorization", token);
    let id = submit(&bearing(&create), &submission).await;
    let at = format!("/v1/requests/{id}");
    wait::until("the request is final", TEST_TIMEOUT, async || {
        bearing(&read).get(&at).await.unwrap().json()["status"] == "COMPLETED"
    })
    .await;
    for route in routes() {
        let Credentials::Tenant(scope) = route.credentials else { continue };
        let method = route.method.clone().unwrap();
        let other = fixture.token(Some("rival"), Some(scope.as_str()));
        let header = Some(("authorization", other.as_str()));
        match (&method, route.path) {
            (_, path_of_one) if path_of_one.contains("{requestId}") => {
                let path = path(&route, &id);
                let response = fixture.call(&method, &path, header, &json!({})).await;
                assert_eq!(
                    (response.status, &response.json()["code"]),
                    (404, &json!("NOT_FOUND")),
                    "{route:?}"
                );
                let owner = own(scope);
                let header = Some(("authorization", owner.as_str()));
                // A request that is final can be read and not cancelled.
                let expected = if route.path.ends_with("/cancel") { 409 } else { 200 };
                let status = fixture.call(&method, &path, header, &json!({})).await.status;
                assert_eq!(status, expected, "{route:?}");
            }
            (&Method::GET, "/v1/requests") => {
                let list = fixture.call(&method, route.path, header, &json!({})).await;
                let items = list.json()["items"].as_array().unwrap().clone();
                assert!(items.iter().all(|item| item["requestId"] != id.as_str()), "{items:?}");
            }
            (&Method::POST, "/v1/requests") => {
                assert_ne!(
                    submit(&bearing(&other), &submission).await,
                    id,
                    "idempotency keys are per tenant"
                );
            }
            (&Method::GET, "/v1/webhook-secret") => {
                let owner = own(scope);
                let theirs = fixture.call(&method, route.path, header, &json!({})).await.json();
                let header = Some(("authorization", owner.as_str()));
                assert_ne!(fixture.call(&method, route.path, header, &json!({})).await.json(), theirs);
            }
            _ => panic!("{route:?}: add a check that other tenants are kept out"),
        }
    }
}

async fn submit(client: &Client, submission: &Value) -> String {
    let response = client.post("/v1/requests", submission).await.unwrap();
    assert_eq!(response.status, 202, "{:?}", response.body);
    response.json()["requestId"].as_str().unwrap().to_owned()
}

#[test]
fn the_list_of_routes_that_are_not_covered_matches_the_table() {
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
    assert_eq!(listed, not_covered, "NOT_COVERED must list exactly these routes, with reasons");
    assert!(NOT_COVERED.iter().all(|(_, reason)| reason.len() > 5));
}
