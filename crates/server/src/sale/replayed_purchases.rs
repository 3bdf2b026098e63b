//! Saves purchases that an operator has replayed: dead letters of purchases that the store had refused (`/admin/dlq`). They
//! become dead letters again if the store still refuses them after several retries, or if their product was deleted.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use weir_core::sale::PurchaseReceipt;
use weir_core::{Timestamp, UserId};
use weir_queue::{Message, MessageClaim, MessageSource, Settlement};
use weir_store::sale::{PURCHASES_TOPIC, ProductId, Purchase, SaleLedger};
use weir_store::{Error, Result};

use super::events::PurchaseReplayFailed;

const BATCH: usize = 64;
/// How often the queue is polled for purchases that were replayed through other servers.
const POLL: Duration = Duration::from_secs(5);
const VISIBILITY: Duration = Duration::from_secs(60);
/// Pauses between attempts.
const RETRIES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];
/// The pause after a failure.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);

pub(crate) struct ReplayedPurchases {
    source: Arc<dyn MessageSource>,
    ledger: Arc<dyn SaleLedger>,
}

/// A purchase as it is written in Redis streams.
#[derive(Debug, Deserialize)]
struct PurchaseMessage {
    product: String,
    user: String,
    number: String,
    at: String,
}

/// How a message is settled.
#[derive(Debug, PartialEq, Eq)]
enum Disposition {
    Done,
    Retry(Duration),
    Dead(String),
}

impl ReplayedPurchases {
    #[must_use]
    pub(crate) fn new(source: Arc<dyn MessageSource>, ledger: Arc<dyn SaleLedger>) -> Self {
        Self { source, ledger }
    }

    /// Saves replayed purchases until `closing` is cancelled.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut is_working = true;
        while !closing.is_cancelled() {
            let outcome = self.save_batch().await;
            if let Err(error) = &outcome
                && is_working
            {
                PurchaseReplayFailed { error }.emit();
            }
            is_working = outcome.is_ok();
            let pause = async {
                match outcome {
                    Ok(0) => self.source.wait(PURCHASES_TOPIC, POLL).await,
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = closing.cancelled() => {}
            }
        }
    }

    /// Claims and saves one batch. Returns how many messages it had.
    async fn save_batch(&self) -> Result<usize> {
        let MessageClaim { messages, receipt } =
            self.source.claim(PURCHASES_TOPIC, BATCH, VISIBILITY).await?;
        let (mut settlement, mut failure) = (Settlement::default(), None);
        for message in &messages {
            match self.save(message).await {
                Ok(Disposition::Done) => settlement.done.push(message.position),
                Ok(Disposition::Retry(pause)) => settlement.retry.push((message.position, pause)),
                Ok(Disposition::Dead(reason)) => settlement.dead.push((message.position, reason)),
                // This message and those behind it stay in the queue.
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        if !messages.is_empty() {
            self.source.settle(&receipt, settlement).await?;
        }
        failure.map_or(Ok(messages.len()), Err)
    }

    async fn save(&self, message: &Message) -> Result<Disposition> {
        let Some(purchase) = parse(&message.payload) else {
            return Ok(Disposition::Dead("the stream entry is not a purchase".to_owned()));
        };
        match self.ledger.record_purchases(purchase.product, vec![purchase]).await {
            Ok(Some(_)) => Ok(Disposition::Done),
            Ok(None) => Ok(Disposition::Dead("the product does not exist".to_owned())),
            Err(error) if error.is_transient() => Err(error),
            Err(error) => Ok(retry_or_give_up(message.attempts, &error)),
        }
    }
}

/// Retries a refused purchase after each of the pauses, then gives up.
fn retry_or_give_up(attempts: u32, error: &Error) -> Disposition {
    let pause = usize::try_from(attempts).ok().and_then(|attempts| RETRIES.get(attempts));
    pause.map_or_else(
        || Disposition::Dead(error.with_causes().to_string()),
        |pause| Disposition::Retry(*pause),
    )
}

fn parse(payload: &[u8]) -> Option<Purchase> {
    let PurchaseMessage { product, user, number, at } = serde_json::from_slice(payload).ok()?;
    let receipt =
        PurchaseReceipt { number: number.parse().ok()?, at: Timestamp::from_micros(at.parse().ok()?) };
    let product = ProductId(product.parse().ok()?);
    Some(Purchase { product, buyer: UserId::parse(user).ok()?, receipt })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_purchases_are_parsed() {
        let purchase = parse(br#"{"product":"7","user":"u","number":"3","at":"9","more":"x"}"#).unwrap();
        assert_eq!((purchase.product, purchase.buyer.as_str()), (ProductId(7), "u"));
        assert_eq!(purchase.receipt, PurchaseReceipt { number: 3, at: Timestamp::from_micros(9) });
        for bad in [
            &b""[..],
            b"{}",
            br#"{"product":"x","user":"u","number":"3","at":"9"}"#,
            br#"{"product":"7","user":"","number":"3","at":"9"}"#,
            br#"{"product":"7","user":"u","number":"-3","at":"9"}"#,
        ] {
            assert_eq!(parse(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn a_refused_purchase_is_retried_three_times() {
        let error = Error::failed("test", "no");
        let pauses: Vec<Disposition> = (0..4).map(|attempts| retry_or_give_up(attempts, &error)).collect();
        let [one, five, twenty_five, dead] = &pauses[..] else { panic!("four") };
        assert_eq!(
            [one, five, twenty_five],
            [1, 5, 25].map(|s| Disposition::Retry(Duration::from_secs(s))).each_ref()
        );
        assert!(matches!(dead, Disposition::Dead(reason) if reason.contains("no")));
    }
}
