//! AI calls and the limits of subscription plans.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use http::Method;
use serde_json::json;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};
use weir_testkit::{postgres, redis, skip, wait};

use super::fixtures::{error, token};
use crate::fixtures::{FAR_FUTURE, InProcess, Running, Store, TEST_TIMEOUT, weir};

/// A client with a token for `user`.
fn caller(running: &Running, user: &str) -> Client {
    running.client().with_header("authorization", &format!("Bearer {}", token(running, user)))
}

fn header(answer: &Response, name: &str) -> String {
    answer.header(name).unwrap_or_else(|| panic!("{name} of {:?}", answer.headers)).to_owned()
}

/// Makes concurrent calls, and returns their statuses.
async fn burst(clients: &[Client], count: usize) -> Vec<u16> {
    let calls = (0..count).map(|n| {
        let client = &clients[n % clients.len()];
        async move { client.get("/api/v1/ai/extract").await.expect("an answer").status }
    });
    join_all(calls).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_200_concurrent_free_calls_exactly_8_pass() {
    let server = InProcess::start(Store::Embedded).await;
    for user in ["alice", "bob"] {
        let statuses = burst(&[server.caller(user)], 200).await;
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 8, "{user}");
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 192, "{user}");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_exhausted_minute_is_429_with_its_headers_and_message() {
    let server = InProcess::start(Store::Embedded).await;
    let client = server.caller("a@b.c");
    for left in (0..8).rev() {
        let answer = client.get("/api/v1/ai/extract").await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(header(&answer, "x-ratelimit-limit"), "5", "requests a minute, not the burst");
        assert_eq!(header(&answer, "x-ratelimit-remaining"), left.to_string());
        assert_eq!(header(&answer, "ratelimit-policy"), "\"minute\";q=5;w=60");
    }
    let denied = client.get("/api/v1/ai/extract").await.unwrap();
    assert_eq!(error(&denied), (429, "RATE_LIMITED".to_owned()));
    let body = denied.json();
    assert_eq!(body["error"], "Too Many Requests");
    let message = "Rate limit exceeded. Maximum 5 AI requests per minute. Please try again shortly.";
    assert_eq!(body["message"], message);
    assert_eq!(header(&denied, "x-ratelimit-limit"), "5");
    assert_eq!(header(&denied, "x-ratelimit-remaining"), "0");
    assert_eq!(header(&denied, "x-ratelimit-reset"), "12");
    assert_eq!(header(&denied, "ratelimit"), "\"minute\";r=0;t=12");
    assert_eq!(header(&denied, "retry-after"), "12", "5 a minute is one every 12 s");
    server.stop().await;
}

#[tokio::test]
async fn tokens_refill_continuously_and_a_denial_takes_none() {
    let server = InProcess::start(Store::Embedded).await;
    let client = server.caller("a@b.c");
    let call = async || client.get("/api/v1/ai/x").await.unwrap();
    for _ in 0..8 {
        assert_eq!(call().await.status, 200);
    }
    for _ in 0..100 {
        assert_eq!(call().await.status, 429);
    }
    server.clock.advance(std::time::Duration::from_micros(11_999_999));
    let denied = call().await;
    assert_eq!(
        (denied.status, header(&denied, "retry-after").as_str()),
        (429, "1"),
        "a microsecond too early"
    );
    server.clock.advance(std::time::Duration::from_micros(1));
    assert_eq!(call().await.status, 200, "5 a minute is one every 12 s");
    assert_eq!(call().await.status, 429);
    server.stop().await;
}

#[tokio::test]
async fn an_exhausted_day_is_reported_first_and_takes_no_token_of_the_minute() {
    let server = InProcess::start(Store::Embedded).await;
    let client = server.caller("a@b.c");
    let mut passed = 0;
    // At the rate of the minute, one every 12 s, until the day is exhausted.
    let denied = loop {
        let answer = client.get("/api/v1/ai/x").await.unwrap();
        if answer.status != 200 {
            break answer;
        }
        passed += 1;
        server.clock.advance(std::time::Duration::from_secs(12));
    };
    assert_eq!(passed, 50, "the day gains its first token back after 1,728 s");
    assert_eq!(denied.json()["message"], "Daily AI request limit of 50 exceeded. Limit resets in 24 hours.");
    assert_eq!(header(&denied, "ratelimit-policy"), "\"daily\";q=50;w=86400");
    assert_eq!(header(&denied, "x-ratelimit-remaining"), "8", "the minute was not touched");
    let retry: u64 = header(&denied, "retry-after").parse().unwrap();
    assert_eq!(retry, 1_728 - 50 * 12);
    server.clock.advance(std::time::Duration::from_secs(retry));
    assert_eq!(client.get("/api/v1/ai/x").await.unwrap().status, 200);
    server.stop().await;
}

#[tokio::test]
async fn disabled_limits_allow_every_call_and_say_so() {
    let running = Running::start_with(Store::Embedded, &[("WEIR_RATE_LIMIT_ENABLED", "false")]).await;
    let client = caller(&running, "a@b.c");
    for _ in 0..20 {
        let answer = client.get("/api/v1/ai/extract").await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(header(&answer, "x-ratelimit-limit"), "5");
        assert_eq!(header(&answer, "x-ratelimit-remaining"), "9223372036854775807");
        assert_eq!(answer.header("ratelimit"), None);
    }
    let nobody = running.client().get("/api/v1/ai/extract").await.unwrap();
    assert_eq!(error(&nobody), (401, "UNAUTHENTICATED".to_owned()), "a token is still required");
}

#[tokio::test]
async fn every_response_of_the_route_has_limit_headers_and_no_other_route_is_limited() {
    let down = format!("http://127.0.0.1:{}", weir_testkit::ports::unused());
    let settings = [("WEIR_AI_UPSTREAM", down.as_str()), ("WEIR_AI_MAX_BODY", "10")];
    let server = InProcess::start_with(Store::Embedded, &settings).await;
    let client = server.caller("a@b.c");
    let wrong = [
        ("/api/v1/ai/x", "", 502),
        ("/api/v1/ai/x", "more than ten bytes", 413),
        ("/api/v1/ai/%2e%2e/x", "", 400),
    ];
    for (index, (path, body, status)) in wrong.into_iter().enumerate() {
        let answer = client.request(Method::POST, path, &[], body).await.unwrap();
        assert_eq!(answer.status, status);
        assert_eq!(
            header(&answer, "x-ratelimit-remaining"),
            (7 - index).to_string(),
            "a failed call is counted, too"
        );
    }
    burst(std::slice::from_ref(&client), 20).await;
    assert_eq!(client.get("/api/v1/ai/x").await.unwrap().status, 429);
    for _ in 0..20 {
        for path in ["/livez", "/api/v1/aix", "/v1/requests"] {
            let answer = client.get(path).await.unwrap();
            assert_ne!(answer.status, 429, "{path}");
            assert_eq!(answer.header("x-ratelimit-limit"), None, "{path}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_token_without_a_user_is_401() {
    let running = Running::start(Store::Embedded).await;
    let answer = caller(&running, "").get("/api/v1/ai/x").await.unwrap();
    assert_eq!(error(&answer), (401, "UNAUTHENTICATED".to_owned()));
}

#[tokio::test]
async fn users_are_limited_separately_whatever_their_names() {
    let running = Running::start(Store::Embedded).await;
    let names = ["a", "A", "a ", "ä", "a\u{0308}", "minute", "a:minute", "a:daily", &"x".repeat(255)];
    let mut left = BTreeSet::new();
    for name in names {
        let answer = caller(&running, name).get("/api/v1/ai/x").await.unwrap();
        left.insert((answer.status, header(&answer, "x-ratelimit-remaining")));
    }
    assert_eq!(left, BTreeSet::from([(200, "7".to_owned())]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_change_the_limits_of_a_tier() {
    let settings = [
        ("WEIR_RATE_LIMIT_TIERS_FREE_REQUESTS_PER_MINUTE", "2"),
        ("WEIR_RATE_LIMIT_TIERS_FREE_BURST_CAPACITY", "3"),
        ("WEIR_RATE_LIMIT_TIERS_FREE_DAILY_LIMIT", "100"),
    ];
    let server = InProcess::start_with(Store::Embedded, &settings).await;
    let client = server.caller("a@b.c");
    let statuses = burst(std::slice::from_ref(&client), 20).await;
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 3);
    let denied = client.post("/api/v1/ai/x", &json!({})).await.unwrap();
    let message = "Rate limit exceeded. Maximum 2 AI requests per minute. Please try again shortly.";
    assert_eq!(denied.json()["message"], message);
    server.stop().await;
}

async fn subscribe(server: &InProcess, user: &str, plan: &str) {
    let path = format!("/admin/subscriptions/{user}");
    let answer = server.operator().put(&path, &json!({ "plan": plan })).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_plan_has_the_burst_of_its_tier() {
    let server = InProcess::start(Store::Embedded).await;
    let plans = [
        ("FREE", 5, 8),
        ("STARTER_MONTHLY", 15, 20),
        ("STARTER_YEARLY", 15, 20),
        ("PRO_MONTHLY", 30, 40),
        ("PRO_YEARLY", 30, 40),
        ("BUSINESS_MONTHLY", 60, 80),
        ("BUSINESS_YEARLY", 60, 80),
    ];
    for (plan, per_minute, burst_capacity) in plans {
        subscribe(&server, plan, plan).await;
        let client = server.caller(plan);
        let statuses = burst(std::slice::from_ref(&client), burst_capacity + 20).await;
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), burst_capacity, "{plan}");
        let denied = client.get("/api/v1/ai/extract").await.unwrap();
        assert_eq!(header(&denied, "x-ratelimit-limit"), per_minute.to_string(), "{plan}");
        let message = format!(
            "Rate limit exceeded. Maximum {per_minute} AI requests per minute. Please try again shortly."
        );
        assert_eq!(denied.json()["message"], message);
        assert_eq!(header(&denied, "retry-after"), (60 / per_minute).to_string(), "{plan}");
    }
    server.stop().await;
}

#[tokio::test]
async fn every_tier_has_its_daily_limit() {
    let server = InProcess::start(Store::Embedded).await;
    let minute = std::time::Duration::from_secs(60);
    for (plan, per_minute, daily) in
        [("STARTER_MONTHLY", 15, 200), ("PRO_MONTHLY", 30, 500), ("BUSINESS_MONTHLY", 60, 1_000)]
    {
        subscribe(&server, plan, plan).await;
        let client = server.caller(plan);
        let mut passed = 0;
        // At the rate of the minute, until the day is exhausted: it refills more slowly than it is used.
        let denied = loop {
            let answer = client.get("/api/v1/ai/x").await.unwrap();
            match answer.status {
                200 => passed += 1,
                _ if header(&answer, "ratelimit-policy").starts_with("\"minute\"") => {
                    server.clock.advance(minute)
                }
                _ => break answer,
            }
        };
        assert!(passed >= daily && passed < daily + daily / per_minute, "{plan}: {passed}");
        let message = format!("Daily AI request limit of {daily} exceeded. Limit resets in 24 hours.");
        assert_eq!(denied.json()["message"], message);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_new_plan_applies_to_the_next_call_and_keeps_what_was_spent() {
    let server = InProcess::start(Store::Embedded).await;
    let client = server.caller("a@b.c");
    burst(std::slice::from_ref(&client), 8).await;
    assert_eq!(client.get("/api/v1/ai/x").await.unwrap().status, 429);
    subscribe(&server, "a@b.c", "PRO_MONTHLY").await;
    let answer = client.get("/api/v1/ai/x").await.unwrap();
    assert_eq!((answer.status, header(&answer, "x-ratelimit-limit").as_str()), (200, "30"));
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "31", "of 40, 9 are spent");
    let operator = server.operator();
    let limits = json!({"requestsPerMinute": 10, "burstCapacity": 10, "dailyLimit": 100});
    assert_eq!(operator.put("/admin/tiers/pro", &limits).await.unwrap().status, 200);
    let answer = client.get("/api/v1/ai/x").await.unwrap();
    assert_eq!((answer.status, header(&answer, "x-ratelimit-remaining").as_str()), (200, "0"));
    assert_eq!(client.get("/api/v1/ai/x").await.unwrap().status, 429);
    assert_eq!(operator.delete("/admin/subscriptions/a@b.c").await.unwrap().status, 204);
    let denied = client.get("/api/v1/ai/x").await.unwrap();
    assert_eq!((denied.status, header(&denied, "x-ratelimit-limit").as_str()), (429, "5"));
    server.stop().await;
}

#[tokio::test]
async fn reading_limits_spends_nothing() {
    let server = InProcess::start(Store::Embedded).await;
    let client = server.caller("a@b.c");
    for _ in 0..20 {
        assert_eq!(client.get("/api/v1/limits/me").await.unwrap().status, 200);
    }
    let answer = client.get("/api/v1/ai/x").await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "7");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_200_concurrent_free_calls_to_two_servers_on_one_redis_exactly_8_pass() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let redis = redis::Server::private(&redis::Options::default());
    let database = postgres::Server::shared().database("ai").await;
    let secret = "a secret that both of the servers know";
    // One token a minute, so that none is refilled while this runs.
    let spawn = || {
        let server = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url());
        let server = server.env("WEIR_RATE_LIMIT_TIERS_FREE_REQUESTS_PER_MINUTE", "1");
        server.env("WEIR_JWT_SECRET", secret).env("WEIR_ROLES", "api").spawn()
    };
    let servers = join_all([spawn(), spawn()]).await;
    for server in &servers {
        wait::until("health is good", TEST_TIMEOUT, async || {
            Client::new(server.base_url()).get("/health").await.unwrap().status == 200
        })
        .await;
    }
    // When Redis does not answer in time, a server decides by itself and counts that. A machine that is too busy for 200
    // concurrent calls gets fewer in the next attempt.
    let mut count = 200;
    for attempt in 0..20 {
        let user = format!("user-{attempt}");
        let claims = Claims { sub: user.clone(), exp: FAR_FUTURE, tenant_id: None, scope: None };
        let bearer = format!("Bearer {}", jwt::sign(secret, &claims).unwrap());
        let callers: Vec<_> = servers
            .iter()
            .map(|server| Client::new(server.base_url()).with_header("authorization", &bearer))
            .collect();
        let before = decided_without_redis(&callers).await;
        let statuses = burst(&callers, count).await;
        let passed = statuses.iter().filter(|status| **status == 200).count();
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), count - passed);
        if decided_without_redis(&callers).await == before {
            assert_eq!(passed, 8, "{count} calls");
            return;
        }
        assert!(
            (8..=16).contains(&passed),
            "{passed} of {count} passed, above the bound for two servers without Redis"
        );
        count = (count / 2).max(20);
    }
    panic!("Redis never answered all calls in time");
}

/// The number of decisions that servers have made without Redis.
async fn decided_without_redis(clients: &[Client]) -> u64 {
    let mut sum = 0;
    for client in clients {
        let text = String::from_utf8(client.get("/metrics").await.unwrap().body.to_vec()).unwrap();
        let line = text.lines().find(|line| line.starts_with("weir_tier_decided_alone_total ")).unwrap();
        sum += line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    }
    sum
}
