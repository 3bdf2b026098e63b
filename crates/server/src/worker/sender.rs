//! The sender: takes accepted messages from the queue and delivers them, in order for each user.
//!
//! Delivery is a log line, `SMS SENT`. A message is done only after its line is out, so a crash in between repeats
//! it rather than losing it. What cannot be understood becomes a dead letter, and the sender goes on.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;
use weir_queue::{Claim, Message, Queue, Settlement, sms};
use weir_store::quota::TOPIC;
use weir_store::{Error, Result};

use crate::config::sender::SenderSettings;
use crate::telemetry::metrics::{Metrics, OutcomeLabels};

/// The pause after the queue could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// How much of a malformed event its log line shows.
const SHOWN_BYTES: usize = 256;

/// Delivers until told to stop, then finishes what it holds.
pub async fn run(
    queue: Arc<dyn Queue>,
    settings: SenderSettings,
    metrics: Arc<Metrics>,
    closing: CancellationToken,
) {
    let counter = |outcome| metrics.quota_deliveries.get_or_create_owned(&OutcomeLabels { outcome });
    let counters = Counters { sent: counter("sent"), malformed: counter("malformed") };
    let mut reachable = true;
    while !closing.is_cancelled() {
        let pause = match deliver_some(&*queue, settings, &counters).await {
            Ok(delivered) => {
                reachable = true;
                if delivered { None } else { Some(settings.poll) }
            }
            Err(error) => {
                if std::mem::replace(&mut reachable, false) {
                    tracing::warn!(error = %Chain(&error), "the sender cannot reach its queue and tries again");
                }
                Some(PAUSE_AFTER_ERROR)
            }
        };
        if let Some(pause) = pause {
            tokio::select! {
                () = queue.wait(TOPIC, pause) => {}
                () = closing.cancelled() => {}
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Counters {
    sent: Counter,
    malformed: Counter,
}

/// Takes and delivers one batch; false when there was nothing.
async fn deliver_some(queue: &dyn Queue, settings: SenderSettings, counters: &Counters) -> Result<bool> {
    let Claim { messages, receipt } = queue.claim(TOPIC, settings.batch_max, settings.visibility).await?;
    if messages.is_empty() {
        return Ok(false);
    }
    // Writing log lines blocks when whoever reads them is slow; that must not hold up the API.
    let counters = counters.clone();
    let settlement = tokio::task::spawn_blocking(move || deliver(messages, &counters))
        .await
        .map_err(|panic| Error::failed("sender", panic))?;
    if !queue.settle(&receipt, settlement).await? {
        tracing::warn!("some messages were delivered too late to be settled and will be delivered again");
    }
    Ok(true)
}

fn deliver(messages: Vec<Message>, counters: &Counters) -> Settlement {
    let mut settlement = Settlement::default();
    for Message { position, key, payload, .. } in messages {
        match sms::decode(&payload) {
            Ok(event) => {
                tracing::info!(
                    target: "weir::sender",
                    user_id = event.user_id,
                    payload = event.message,
                    message_id = %event.message_id,
                    "SMS SENT"
                );
                counters.sent.inc();
                settlement.done.push(position);
            }
            Err(error) => {
                let shown = String::from_utf8_lossy(&payload[..payload.len().min(SHOWN_BYTES)]).into_owned();
                tracing::error!(
                    target: "weir::sender",
                    key, payload = shown, %error, shard = position.shard, id = position.id,
                    "malformed event kept as a dead letter"
                );
                counters.malformed.inc();
                settlement.dead.push((position, format!("malformed event: {error}")));
            }
        }
    }
    settlement
}

/// An error with its causes, on one line.
pub(crate) struct Chain<'a>(pub(crate) &'a Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = std::error::Error::source(self.0);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
