//! Buyers who are named by tokens: `sale.identity = "token"`.

use http::Method;
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Response;

use super::fixtures::create_active;
use crate::fixtures::{FAR_FUTURE, Running, Store};

const TOKENS: [(&str, &str); 1] = [("WEIR_SALE_IDENTITY", "token")];

fn token(running: &Running, sub: &str) -> String {
    let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims { sub: sub.to_owned(), exp: FAR_FUTURE, tenant_id: None, scope: None };
    format!("Bearer {}", jwt::sign(&secret, &claims).unwrap())
}

/// Calls `/api/v1/purchases` as a buyer who calls itself `mallory` in `X-User-Id`.
async fn call(running: &Running, method: Method, token: Option<&str>) -> Response {
    let mut headers = vec![("content-type", "application/json"), ("x-user-id", "mallory")];
    headers.extend(token.map(|token| ("authorization", token)));
    let (path, body) = match method {
        Method::POST => ("/api/v1/purchases", json!({"sku": "W", "qty": 1}).to_string()),
        _ => ("/api/v1/purchases?sku=W", String::new()),
    };
    running.client().request(method, path, &headers, body).await.unwrap()
}

fn code(response: &Response) -> Value {
    response.json()["error"]["code"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_buyer_is_the_subject_of_the_token_whatever_the_header_says() {
    let settings = [TOKENS[0], ("WEIR_SALE_USER_PER_SECOND", "0")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    create_active(&running.operator(), "W", 5).await;
    let [ada, bob] = ["ada", "bob"].map(|sub| token(&running, sub));
    assert_eq!(call(&running, Method::POST, Some(&ada)).await.json()["success"], true);
    assert_eq!(code(&call(&running, Method::POST, Some(&ada)).await), "ALREADY_PURCHASED");
    assert_eq!(call(&running, Method::GET, Some(&ada)).await.status, 200);
    assert_eq!(call(&running, Method::GET, Some(&bob)).await.status, 404, "bob has bought nothing");
    let listed = running.operator().get("/api/v1/products/W/purchases").await.unwrap().json();
    assert_eq!(listed["data"]["items"][0]["userId"], "ada");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_buyer_without_a_token_that_names_it_is_unauthorized() {
    let running = Running::start_with(Store::Embedded, &TOKENS).await;
    create_active(&running.operator(), "W", 5).await;
    let (empty, long) = (token(&running, ""), token(&running, &"x".repeat(256)));
    for method in [Method::POST, Method::GET] {
        for sent in [None, Some("Bearer a.b.c"), Some(empty.as_str()), Some(long.as_str())] {
            let answer = call(&running, method.clone(), sent).await;
            assert_eq!((answer.status, code(&answer)), (401, json!("UNAUTHORIZED")), "{method} {sent:?}");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer realm=\"weir\""), "{method} {sent:?}");
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains("token") && !message.contains("X-Admin-Key"), "{message}");
        }
    }
}
