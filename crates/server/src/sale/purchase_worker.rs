//! Purchases that could not be written down, once an operator has them tried again: `/admin/dlq`. They were dead letters, and are
//! dead letters again when the store still refuses them after the pauses, or their product is gone.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use weir_core::sale::PurchaseReceipt;
use weir_core::{Timestamp, UserId};
use weir_queue::{Message, MessageClaim, MessageSource, Settlement};
use weir_store::sale::{PURCHASES_TOPIC, ProductId, Purchase, SaleLedger};
use weir_store::{Error, Result};

const BATCH: usize = 64;
/// How soon those are seen that were replayed on other servers.
const POLL: Duration = Duration::from_secs(5);
const VISIBILITY: Duration = Duration::from_secs(60);
/// Pauses between attempts.
const RETRIES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];
/// The pause after the store could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);

/// Writes them down.
pub(crate) struct Purchases {
    source: Arc<dyn MessageSource>,
    ledger: Arc<dyn SaleLedger>,
}

/// A purchase as it stands in a stream.
#[derive(Debug, Deserialize)]
struct Entry {
    product: String,
    user: String,
    number: String,
    at: String,
}

/// What is to be done about one.
#[derive(Debug, PartialEq, Eq)]
enum NextStep {
    Done,
    Retry(Duration),
    Dead(String),
}

impl Purchases {
    /// Whoever takes them from here and writes them down there.
    #[must_use]
    pub(crate) fn new(source: Arc<dyn MessageSource>, ledger: Arc<dyn SaleLedger>) -> Self {
        Self { source, ledger }
    }

    /// Writes down what is replayed, until told to stop.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut reachable = true;
        while !closing.is_cancelled() {
            let outcome = self.write_some().await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                tracing::warn!(error = %error.with_causes(), "purchases cannot be written down and are tried again");
            }
            reachable = outcome.is_ok();
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

    /// Takes one batch and writes it down, and says how many it took.
    async fn write_some(&self) -> Result<usize> {
        let MessageClaim { messages, receipt } =
            self.source.claim(PURCHASES_TOPIC, BATCH, VISIBILITY).await?;
        let (mut settlement, mut broken) = (Settlement::default(), None);
        for message in &messages {
            match self.write(message).await {
                Ok(NextStep::Done) => settlement.done.push(message.position),
                Ok(NextStep::Retry(pause)) => settlement.retry.push((message.position, pause)),
                Ok(NextStep::Dead(reason)) => settlement.dead.push((message.position, reason)),
                // It stays where it is, and so does what is behind it.
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            }
        }
        if !messages.is_empty() {
            self.source.settle(&receipt, settlement).await?;
        }
        broken.map_or(Ok(messages.len()), Err)
    }

    async fn write(&self, message: &Message) -> Result<NextStep> {
        let Some(purchase) = parse(&message.payload) else {
            return Ok(NextStep::Dead("it is no purchase".to_owned()));
        };
        match self.ledger.record_purchases(purchase.product, vec![purchase]).await {
            Ok(Some(_)) => Ok(NextStep::Done),
            Ok(None) => Ok(NextStep::Dead("its product is gone".to_owned())),
            Err(error) if error.is_transient() => Err(error),
            Err(error) => Ok(refused(message.attempts, &error)),
        }
    }
}

/// What the store refuses is tried again after each pause, then no more.
fn refused(attempts: u32, error: &Error) -> NextStep {
    let pause = usize::try_from(attempts).ok().and_then(|attempts| RETRIES.get(attempts));
    pause.map_or_else(|| NextStep::Dead(error.with_causes().to_string()), |pause| NextStep::Retry(*pause))
}

fn parse(payload: &[u8]) -> Option<Purchase> {
    let Entry { product, user, number, at } = serde_json::from_slice(payload).ok()?;
    let receipt =
        PurchaseReceipt { number: number.parse().ok()?, at: Timestamp::from_micros(at.parse().ok()?) };
    let product = ProductId(product.parse().ok()?);
    Some(Purchase { product, buyer: UserId::parse(user).ok()?, receipt })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_a_stream_is_understood_and_nothing_else() {
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
    fn what_is_refused_is_tried_again_three_times() {
        let error = Error::failed("test", "no");
        let pauses: Vec<NextStep> = (0..4).map(|attempts| refused(attempts, &error)).collect();
        let [one, five, twenty_five, dead] = &pauses[..] else { panic!("four") };
        assert_eq!(
            [one, five, twenty_five],
            [1, 5, 25].map(|s| NextStep::Retry(Duration::from_secs(s))).each_ref()
        );
        assert!(matches!(dead, NextStep::Dead(reason) if reason.contains("no")));
    }
}
