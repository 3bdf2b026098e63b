//! Simulated buyers: when each comes, what each does, and what came of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until};

use crate::client::Client;

/// Attempts under way at once.
const AT_ONCE: usize = 256;
/// How soon most come after the opening, on the average.
const EAGERNESS: Duration = Duration::from_secs(2);
/// One of so many cannot wait, and comes up to as much too early.
const IMPATIENT_EVERY: u32 = 20;
const TOO_EARLY: Duration = Duration::from_secs(2);
/// How often a buyer asks again who was told to wait, or was not answered.
const ATTEMPTS_MAX: u32 = 5;
const WAIT: Duration = Duration::from_millis(1_100);

/// What came of all attempts so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) attempts: AtomicU64,
    pub(super) bought: AtomicU64,
    pub(super) sold_out: AtomicU64,
    pub(super) too_early: AtomicU64,
    pub(super) too_late: AtomicU64,
    pub(super) limited: AtomicU64,
    pub(super) failed: AtomicU64,
}

impl Tally {
    pub(super) fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}

/// What a buyer is told.
#[derive(Debug, PartialEq, Eq)]
enum PurchaseAnswer {
    Bought,
    SoldOut,
    NotActive,
    Limited,
    Failed,
}

/// Lets so many buyers come around `opening`, and returns when the last has gone.
pub(super) async fn come(client: &Client, sku: &str, buyers: u32, opening: Instant, tally: &Arc<Tally>) {
    let (turns, body) = (Arc::new(Semaphore::new(AT_ONCE)), body(sku));
    let crowd: Vec<_> = (1..=buyers)
        .map(|n| {
            let (tally, turns, body) = (Arc::clone(tally), Arc::clone(&turns), body.clone());
            let buyer = Buyer { client: client.as_buyer(format!("buyer-{n:05}")), turns, body, tally };
            let arrival = arrival(opening, n % IMPATIENT_EVERY == 0);
            tokio::spawn(async move {
                sleep_until(arrival).await;
                buyer.shop(opening).await;
            })
        })
        .collect();
    for buyer in crowd {
        // One that panicked has been told of already.
        let _ = buyer.await;
    }
}

fn body(sku: &str) -> Bytes {
    Bytes::from(json!({"sku": sku, "qty": 1}).to_string())
}

/// Most come soon after the opening, fewer and fewer later.
fn arrival(opening: Instant, is_impatient: bool) -> Instant {
    if is_impatient {
        return opening.checked_sub(TOO_EARLY.mul_f64(fastrand::f64())).unwrap_or(opening);
    }
    opening + EAGERNESS.mul_f64(-(1.0 - fastrand::f64()).ln())
}

struct Buyer {
    client: Client,
    turns: Arc<Semaphore>,
    body: Bytes,
    tally: Arc<Tally>,
}

impl Buyer {
    async fn shop(&self, opening: Instant) {
        for attempt in 1..=ATTEMPTS_MAX {
            let told = self.ask().await;
            let is_early = Instant::now() < opening;
            self.count(&told, is_early);
            match told {
                PurchaseAnswer::Bought | PurchaseAnswer::SoldOut => return,
                PurchaseAnswer::NotActive if !is_early => return,
                _ if attempt == ATTEMPTS_MAX => return,
                _ => sleep(WAIT).await,
            }
        }
    }

    async fn ask(&self) -> PurchaseAnswer {
        // Never closed.
        let _turn = self.turns.acquire().await;
        match self.client.post("/api/v1/purchases", "application/json", self.body.clone()).await {
            Ok((status, body)) => told(status, &body),
            Err(_unanswered) => PurchaseAnswer::Failed,
        }
    }

    fn count(&self, told: &PurchaseAnswer, is_early: bool) {
        let tally = &self.tally;
        let counter = match told {
            PurchaseAnswer::Bought => &tally.bought,
            PurchaseAnswer::SoldOut => &tally.sold_out,
            PurchaseAnswer::NotActive if is_early => &tally.too_early,
            PurchaseAnswer::NotActive => &tally.too_late,
            PurchaseAnswer::Limited => &tally.limited,
            PurchaseAnswer::Failed => &tally.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        tally.attempts.fetch_add(1, Ordering::Relaxed);
    }
}

fn told(status: u16, body: &[u8]) -> PurchaseAnswer {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    match (status, answer["error"]["code"].as_str()) {
        (200, None) if answer["success"] == true => PurchaseAnswer::Bought,
        // A buyer whose first answer was lost has what it came for.
        (200, Some("ALREADY_PURCHASED")) => PurchaseAnswer::Bought,
        (200, Some("SOLD_OUT")) => PurchaseAnswer::SoldOut,
        (200, Some("SALE_NOT_ACTIVE")) => PurchaseAnswer::NotActive,
        (429, _) => PurchaseAnswer::Limited,
        _ => PurchaseAnswer::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_apart() {
        let refusal = |code: &str| json!({"success": false, "error": {"code": code}}).to_string();
        assert_eq!(told(200, br#"{"success":true,"data":{"purchaseNo":"PUR-1"}}"#), PurchaseAnswer::Bought);
        assert_eq!(told(200, refusal("ALREADY_PURCHASED").as_bytes()), PurchaseAnswer::Bought);
        assert_eq!(told(200, refusal("SOLD_OUT").as_bytes()), PurchaseAnswer::SoldOut);
        assert_eq!(told(200, refusal("SALE_NOT_ACTIVE").as_bytes()), PurchaseAnswer::NotActive);
        assert_eq!(told(429, refusal("RATE_LIMITED").as_bytes()), PurchaseAnswer::Limited);
        assert_eq!(told(503, b"busy"), PurchaseAnswer::Failed);
        assert_eq!(told(200, b"<html>"), PurchaseAnswer::Failed);
    }

    #[test]
    fn the_impatient_come_early_and_the_rest_do_not() {
        let opening = Instant::now() + Duration::from_secs(60);
        for _ in 0..1_000 {
            let early = arrival(opening, true);
            assert!(early <= opening && early + TOO_EARLY >= opening);
            assert!(arrival(opening, false) >= opening);
        }
    }
}
