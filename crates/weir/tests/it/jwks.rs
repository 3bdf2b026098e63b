//! Tokens of an identity provider whose keys Weir fetches (`WEIR_JWKS_URL`).

use std::time::Duration;

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;
use weir_testkit::key_server::KeyServer;
use weir_testkit::process::Weir;
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, TEST_TIMEOUT, weir};

const SECRET: &str = "a secret of at least 32 bytes, for HS256";
const JWKS: &str = include_str!("../../../server/src/auth/jwt/testdata/jwks.json");
const EC_PRIVATE: &[u8] = include_bytes!("../../../server/src/auth/jwt/testdata/ec.private.pem");
const RSA_PRIVATE: &[u8] = include_bytes!("../../../server/src/auth/jwt/testdata/rsa.private.pem");

/// The key set of the tests with other ids.
fn published(rename: impl Fn(&str) -> String) -> String {
    let mut set: Value = serde_json::from_str(JWKS).unwrap();
    for key in set["keys"].as_array_mut().unwrap() {
        key["kid"] = rename(key["kid"].as_str().unwrap()).into();
    }
    set.to_string()
}

fn token(algorithm: Algorithm, key_id: &str, more: Value) -> String {
    let key = match algorithm {
        Algorithm::ES256 => EncodingKey::from_ec_pem(EC_PRIVATE).unwrap(),
        _ => EncodingKey::from_rsa_pem(RSA_PRIVATE).unwrap(),
    };
    let header = Header { kid: Some(key_id.to_owned()), ..Header::new(algorithm) };
    let mut claims = json!({"sub": "a@b.c", "exp": FAR_FUTURE});
    claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    encode(&header, &claims, &key).unwrap()
}

/// The status of a call that any valid token may make.
async fn status(weir: &Weir, token: &str) -> u16 {
    let client = Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"));
    client.get("/api/v1/limits/me").await.unwrap().status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_verified_with_the_keys_at_a_url_and_with_the_secret_if_it_is_set() {
    let provider = KeyServer::start(JWKS).await;
    let start = || {
        weir()
            .env("WEIR_JWKS_URL", provider.https_url())
            .env("SSL_CERT_FILE", provider.ca_file())
            .env("WEIR_AUTH_ISSUER", "https://login.example")
    };
    let issued = json!({"iss": "https://login.example", "scope": ["openid", "admin:read"]});
    let claims = Claims { sub: "a".into(), exp: FAR_FUTURE, tenant_id: None, scope: None };
    let own = jwt::sign_for(SECRET, &claims, Some("https://login.example"), None).unwrap();
    for (weir, own_status) in
        [(start().spawn().await, 401), (start().env("WEIR_JWT_SECRET", SECRET).spawn().await, 200)]
    {
        assert_eq!(status(&weir, &token(Algorithm::RS256, "rsa-1", issued.clone())).await, 200);
        let elliptic = token(Algorithm::ES256, "ec-1", issued.clone());
        assert_eq!(status(&weir, &elliptic).await, 200);
        let reader = Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {elliptic}"));
        assert_eq!(reader.get("/admin/audit").await.unwrap().status, 200, "a provider can make operators");
        assert_eq!(status(&weir, &token(Algorithm::RS256, "rsa-1", json!({}))).await, 401, "another issuer");
        assert_eq!(
            status(&weir, &token(Algorithm::ES256, "rsa-1", issued.clone())).await,
            401,
            "another key"
        );
        assert_eq!(status(&weir, &own).await, own_status);
        let public = jwt::sign_for(JWKS, &claims, Some("https://login.example"), None).unwrap();
        assert_eq!(status(&weir, &public).await, 401, "a public key is no secret");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_is_not_who_it_should_be_has_no_keys() {
    let (provider, other) = (KeyServer::start(JWKS).await, KeyServer::start(JWKS).await);
    let weir =
        weir().env("WEIR_JWKS_URL", provider.https_url()).env("SSL_CERT_FILE", other.ca_file()).spawn().await;
    assert_eq!(status(&weir, &token(Algorithm::ES256, "ec-1", json!({}))).await, 401);
    assert!(provider.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_a_provider_rotates_are_followed() {
    let provider = KeyServer::start(JWKS).await;
    let weir = weir().env("WEIR_JWKS_URL", provider.http_url()).spawn().await;
    let first = token(Algorithm::ES256, "ec-1", json!({}));
    assert_eq!(status(&weir, &first).await, 200);
    provider.publish(200, published(|id| format!("{id}-next")));
    let next = token(Algorithm::ES256, "ec-1-next", json!({}));
    // Within ten seconds of a fetch there is no other.
    wait::until("the next key is taken up", TEST_TIMEOUT, async || status(&weir, &next).await == 200).await;
    assert_eq!(status(&weir, &first).await, 401, "the first key is withdrawn");
    let calls = provider.calls();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert!(calls[1] - calls[0] >= Duration::from_secs(10), "{calls:?}");
    provider.publish(200, "{\"keys\":[]}");
    wait::until("the only keys are withdrawn", TEST_TIMEOUT, async || {
        // It names a key that is unknown, so the keys are fetched before their time.
        assert_eq!(status(&weir, &first).await, 401);
        status(&weir, &next).await == 401
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_starts_without_its_provider_and_keeps_its_keys_while_it_is_away() {
    let provider = KeyServer::start(JWKS).await;
    provider.network().refuse();
    let weir = weir().env("WEIR_JWKS_URL", provider.http_url()).spawn().await;
    let good = token(Algorithm::ES256, "ec-1", json!({}));
    assert_eq!(status(&weir, &good).await, 401);
    provider.network().pass();
    wait::until("the keys are fetched", TEST_TIMEOUT, async || status(&weir, &good).await == 200).await;
    provider.network().refuse();
    let unknown = token(Algorithm::ES256, "ec-2", json!({}));
    let failures = async || {
        assert_eq!(status(&weir, &unknown).await, 401);
        weir.log_lines().iter().any(|line| line.contains("2 known keys stay in use"))
    };
    wait::until("fetching the keys fails", TEST_TIMEOUT, failures).await;
    let other = token(Algorithm::RS256, "rsa-1", json!({}));
    assert_eq!((status(&weir, &good).await, status(&weir, &other).await), (200, 200));
}
