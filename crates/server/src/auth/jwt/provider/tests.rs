use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use weir_testkit::key_server::KeyServer;
use weir_testkit::wait;

use super::*;
use crate::auth::jwt::VerificationKey;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const EC_PRIVATE: &[u8] = include_bytes!("../testdata/ec.private.pem");
const JWKS: &str = include_str!("../testdata/jwks.json");

/// Short enough for a test to wait for, and long enough for a busy machine.
const TIMING: Timing = Timing {
    start: Duration::from_millis(500),
    pause: Duration::from_millis(200),
    refresh: Duration::from_secs(3_600),
    connect_timeout: Duration::from_secs(10),
    read_timeout: Duration::from_secs(10),
};

/// A key set with the test's EC key under this id.
fn published(key_id: &str) -> String {
    let set: Value = serde_json::from_str(JWKS).unwrap();
    let keys = set["keys"].as_array().unwrap();
    let mut key = keys.iter().find(|key| key["kty"] == "EC").unwrap().clone();
    key["kid"] = key_id.into();
    json!({ "keys": [key] }).to_string()
}

fn token(key_id: &str) -> String {
    let header = Header { kid: Some(key_id.to_owned()), ..Header::new(Algorithm::ES256) };
    let claims = json!({"sub": "a@b.c", "exp": 4_000_000_000_u64});
    encode(&header, &claims, &EncodingKey::from_ec_pem(EC_PRIVATE).unwrap()).unwrap()
}

fn provider_with(server: &KeyServer, timing: Timing) -> Arc<ProviderKeys> {
    let url = server.http_url().parse().unwrap();
    let own_key = Some(VerificationKey::from_secret(SECRET));
    Arc::new(ProviderKeys::new(&url, own_key, RequiredClaims::default(), timing).unwrap())
}

/// Keeps the keys fresh until the token is cancelled.
fn keep_fresh(provider: &Arc<ProviderKeys>) -> CancellationToken {
    let closing = CancellationToken::new();
    let (provider, stop) = (Arc::clone(provider), closing.clone());
    tokio::spawn(async move { provider.keep_fresh(&stop).await });
    closing
}

fn verifies(provider: &ProviderKeys, token: &str) -> bool {
    provider.current().verify(token).is_some()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_a_token_names_is_fetched_and_a_removed_one_verifies_nothing() {
    let server = KeyServer::start(published("first")).await;
    let provider = provider_with(&server, TIMING);
    provider.fetch_first().await;
    let _running = keep_fresh(&provider);
    assert!(verifies(&provider, &token("first")), "this token is remembered as verified");
    server.publish(200, published("second"));
    assert!(!verifies(&provider, &token("second")));
    wait::until("the new key is fetched", TEST_TIMEOUT, async || provider.fetch_key("second").await).await;
    assert!(verifies(&provider, &token("second")));
    assert!(!verifies(&provider, &token("first")), "the provider has withdrawn this key");
    let own = crate::auth::jwt::sign(
        SECRET,
        &crate::auth::jwt::Claims { sub: "a".into(), exp: 4_000_000_000, tenant_id: None, scope: None },
    );
    assert!(verifies(&provider, &own.unwrap()), "the secret is good as before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_fetched_again_from_time_to_time() {
    let server = KeyServer::start(published("first")).await;
    let provider = provider_with(&server, Timing { refresh: Duration::from_millis(400), ..TIMING });
    provider.fetch_first().await;
    let _running = keep_fresh(&provider);
    server.publish(200, published("second"));
    wait::until("the keys are fetched again", TEST_TIMEOUT, async || verifies(&provider, &token("second")))
        .await;
    assert!(!verifies(&provider, &token("first")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_keys_cost_the_provider_one_call_in_a_while() {
    let server = KeyServer::start(published("first")).await;
    let provider = provider_with(&server, TIMING);
    provider.fetch_first().await;
    let running = keep_fresh(&provider);
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let (provider, running) = (Arc::clone(&provider), running.clone());
            tokio::spawn(async move {
                let mut attempts = 0;
                while !running.is_cancelled() {
                    assert!(!provider.fetch_key(&format!("{caller}-{attempts}")).await);
                    attempts += 1;
                    tokio::task::yield_now().await;
                }
                attempts
            })
        })
        .collect();
    wait::until("the keys were fetched five times", TEST_TIMEOUT, async || server.calls().len() >= 5).await;
    running.cancel();
    let mut attempts = 0;
    for caller in callers {
        attempts += caller.await.unwrap();
    }
    assert!(attempts > 100, "{attempts}");
    let calls = server.calls();
    assert!(calls.windows(2).all(|pair| pair[1] - pair[0] >= TIMING.pause), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_stay_in_use_while_the_provider_answers_nonsense() {
    let server = KeyServer::start(published("first")).await;
    let provider = provider_with(&server, TIMING);
    provider.fetch_first().await;
    let large = format!("{{\"keys\":[\"{}\"]}}", "x".repeat(BYTES_MAX));
    let other = published("second");
    for (status, body) in [
        (200, "<html>Sign in</html>"),
        (200, ""),
        (200, "{}"),
        (200, "{\"keys\":null}"),
        (200, "[]"),
        (200, large.as_str()),
        (302, ""),
        (404, "{}"),
        (500, other.as_str()),
    ] {
        server.publish(status, body);
        let fetched = provider.fetch().await;
        assert!(fetched.is_err(), "{status} {body:.40}");
        assert!(verifies(&provider, &token("first")), "{status} {body:.40}");
    }
    server.publish(200, other.as_str());
    provider.fetch().await.unwrap();
    assert!(verifies(&provider, &token("second")) && !verifies(&provider, &token("first")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_may_withdraw_its_only_key() {
    let server = KeyServer::start(published("first")).await;
    let provider = provider_with(&server, TIMING);
    for none_usable in ["{\"keys\":[]}", "{\"keys\":[{\"kty\":\"oct\",\"k\":\"c2VjcmV0\"}]}"] {
        server.publish(200, published("first"));
        provider.fetch().await.unwrap();
        assert!(verifies(&provider, &token("first")), "this token is remembered as verified");
        server.publish(200, none_usable);
        provider.fetch().await.unwrap();
        assert!(!verifies(&provider, &token("first")), "{none_usable}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_stay_in_use_while_the_provider_is_away_or_slow() {
    let server = KeyServer::start(published("first")).await;
    let short = Duration::from_millis(500);
    let provider = provider_with(&server, Timing { connect_timeout: short, read_timeout: short, ..TIMING });
    wait::until("the first keys are there", TEST_TIMEOUT, async || provider.fetch().await.is_ok()).await;
    server.network().refuse();
    assert!(provider.fetch().await.is_err());
    server.network().black_hole();
    assert!(matches!(provider.fetch().await, Err(FetchError::NoResponse(OutboundError::TimedOut))));
    assert!(verifies(&provider, &token("first")));
    server.publish(200, published("second"));
    server.network().pass();
    let _running = keep_fresh(&provider);
    wait::until("it is tried again", TEST_TIMEOUT, async || verifies(&provider, &token("second"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_waits_for_the_first_keys_and_goes_on_without_them() {
    let server = KeyServer::start(published("first")).await;
    server.network().refuse();
    let provider = provider_with(&server, TIMING);
    let started = Instant::now();
    provider.fetch_first().await;
    assert!(started.elapsed() >= TIMING.start);
    assert!(!verifies(&provider, &token("first")));
    let _running = keep_fresh(&provider);
    server.network().pass();
    wait::until("the keys are there", TEST_TIMEOUT, async || verifies(&provider, &token("first"))).await;
}
