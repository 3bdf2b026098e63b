//! Simulated buyers: when they arrive, what they do, and the results.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until};

use crate::client::Client;

/// Concurrent attempts.
const CONCURRENCY: usize = 256;
/// The mean delay between the opening and a buyer's arrival.
const ARRIVAL_DELAY_MEAN: Duration = Duration::from_secs(2);
/// One in this many buyers arrives too early, by up to `TOO_EARLY`.
const EARLY_EVERY: u32 = 20;
const TOO_EARLY: Duration = Duration::from_secs(2);
/// How often a buyer tries who was told to wait or got no response, and the wait in between.
const ATTEMPTS_MAX: u32 = 5;
const WAIT: Duration = Duration::from_millis(1_100);

/// The results of all attempts so far.
#[derive(Debug, Default)]
pub(super) struct SaleTally {
    pub(super) attempts: AtomicU64,
    pub(super) bought: AtomicU64,
    pub(super) sold_out: AtomicU64,
    pub(super) too_early: AtomicU64,
    pub(super) too_late: AtomicU64,
    pub(super) limited: AtomicU64,
    pub(super) failed: AtomicU64,
}

impl SaleTally {
    pub(super) fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}

/// The result of an attempt.
#[derive(Debug, PartialEq, Eq)]
enum PurchaseResult {
    Bought,
    SoldOut,
    NotActive,
    Limited,
    Failed,
}

/// Runs this many buyers around `opening`, and repermits when the last one is done.
pub(super) async fn run_buyers(
    client: &Client,
    sku: &str,
    buyers: u32,
    opening: Instant,
    tally: &Arc<SaleTally>,
) {
    let (permits, body) = (Arc::new(Semaphore::new(CONCURRENCY)), body(sku));
    let crowd: Vec<_> = (1..=buyers)
        .map(|n| {
            let (tally, permits, body) = (Arc::clone(tally), Arc::clone(&permits), body.clone());
            let buyer = Buyer { client: client.as_buyer(format!("buyer-{n:05}")), permits, body, tally };
            let arrival = arrival(opening, n % EARLY_EVERY == 0);
            tokio::spawn(async move {
                sleep_until(arrival).await;
                buyer.shop(opening).await;
            })
        })
        .collect();
    for buyer in crowd {
        // The panic of a buyer has been printed already.
        let _ = buyer.await;
    }
}

fn body(sku: &str) -> Bytes {
    Bytes::from(json!({"sku": sku, "qty": 1}).to_string())
}

/// Returns a random arrival time: most buyers arrive soon after the opening, fewer and fewer later.
fn arrival(opening: Instant, is_early: bool) -> Instant {
    if is_early {
        return opening.checked_sub(TOO_EARLY.mul_f64(fastrand::f64())).unwrap_or(opening);
    }
    opening + ARRIVAL_DELAY_MEAN.mul_f64(-(1.0 - fastrand::f64()).ln())
}

struct Buyer {
    client: Client,
    permits: Arc<Semaphore>,
    body: Bytes,
    tally: Arc<SaleTally>,
}

impl Buyer {
    async fn shop(&self, opening: Instant) {
        for attempt in 1..=ATTEMPTS_MAX {
            let result = self.buy().await;
            let is_early = Instant::now() < opening;
            self.count(&result, is_early);
            match result {
                PurchaseResult::Bought | PurchaseResult::SoldOut => return,
                PurchaseResult::NotActive if !is_early => return,
                _ if attempt == ATTEMPTS_MAX => return,
                _ => sleep(WAIT).await,
            }
        }
    }

    async fn buy(&self) -> PurchaseResult {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        match self.client.post("/api/v1/purchases", "application/json", self.body.clone()).await {
            Ok((status, body)) => parse_result(status, &body),
            Err(_unanswered) => PurchaseResult::Failed,
        }
    }

    fn count(&self, result: &PurchaseResult, is_early: bool) {
        let tally = &self.tally;
        let counter = match result {
            PurchaseResult::Bought => &tally.bought,
            PurchaseResult::SoldOut => &tally.sold_out,
            PurchaseResult::NotActive if is_early => &tally.too_early,
            PurchaseResult::NotActive => &tally.too_late,
            PurchaseResult::Limited => &tally.limited,
            PurchaseResult::Failed => &tally.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        tally.attempts.fetch_add(1, Ordering::Relaxed);
    }
}

fn parse_result(status: u16, body: &[u8]) -> PurchaseResult {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    match (status, answer["error"]["code"].as_str()) {
        (200, None) if answer["success"] == true => PurchaseResult::Bought,
        // A buyer whose first response was lost owns the unit.
        (200, Some("ALREADY_PURCHASED")) => PurchaseResult::Bought,
        (200, Some("SOLD_OUT")) => PurchaseResult::SoldOut,
        (200, Some("SALE_NOT_ACTIVE")) => PurchaseResult::NotActive,
        (429, _) => PurchaseResult::Limited,
        _ => PurchaseResult::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_mapped_to_results() {
        let refusal = |code: &str| json!({"success": false, "error": {"code": code}}).to_string();
        assert_eq!(
            parse_result(200, br#"{"success":true,"data":{"purchaseNo":"PUR-1"}}"#),
            PurchaseResult::Bought
        );
        assert_eq!(parse_result(200, refusal("ALREADY_PURCHASED").as_bytes()), PurchaseResult::Bought);
        assert_eq!(parse_result(200, refusal("SOLD_OUT").as_bytes()), PurchaseResult::SoldOut);
        assert_eq!(parse_result(200, refusal("SALE_NOT_ACTIVE").as_bytes()), PurchaseResult::NotActive);
        assert_eq!(parse_result(429, refusal("RATE_LIMITED").as_bytes()), PurchaseResult::Limited);
        assert_eq!(parse_result(503, b"busy"), PurchaseResult::Failed);
        assert_eq!(parse_result(200, b"<html>"), PurchaseResult::Failed);
    }

    #[test]
    fn only_early_buyers_arrive_before_the_opening() {
        let opening = Instant::now() + Duration::from_secs(60);
        for _ in 0..1_000 {
            let early = arrival(opening, true);
            assert!(early <= opening && early + TOO_EARLY >= opening);
            assert!(arrival(opening, false) >= opening);
        }
    }
}
