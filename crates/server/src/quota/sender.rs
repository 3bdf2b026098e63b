//! The sender: takes accepted messages from the queue and delivers them, in order for each user.
//!
//! Delivery is a log line, `SMS SENT`. A message is done only after its line is out, so a crash in between repeats
//! it rather than losing it. What cannot be understood becomes a dead letter, and the sender goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;
use weir_queue::{Message, MessageClaim, MessageSource, Settlement, sms};
use weir_store::quota::TOPIC;
use weir_store::{Error, Result};

use super::settings::SenderSettings;
use super::sms_log::Lines;
use crate::settings::Settings;
use crate::settings::log::LogFormat;
use crate::telemetry::labels::OutcomeLabels;
use crate::telemetry::metrics::Metrics;

/// The pause after a batch that was not full, so that the next one is worth its commits. What comes after a quiet
/// while is delivered at once.
const LINGER: Duration = Duration::from_millis(20);
/// The pause after the queue could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// How much of a malformed event its log line shows.
const SHOWN_BYTES: usize = 256;

/// What the sender works with.
#[derive(Clone)]
pub(crate) struct Sender {
    source: Arc<dyn MessageSource>,
    settings: SenderSettings,
    format: LogFormat,
    sent: Counter,
    malformed: Counter,
    /// Whether the last lines broke off.
    torn: Arc<AtomicBool>,
}

impl Sender {
    /// A sender of what comes from here.
    #[must_use]
    pub(crate) fn new(source: Arc<dyn MessageSource>, settings: &Settings, metrics: &Metrics) -> Self {
        let counter = |outcome| metrics.quota.deliveries.get_or_create_owned(&OutcomeLabels { outcome });
        Self {
            source,
            settings: settings.sender,
            format: settings.log.format,
            sent: counter("sent"),
            malformed: counter("malformed"),
            torn: Arc::default(),
        }
    }

    /// Delivers until told to stop, then finishes what it holds.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut reachable = true;
        while !closing.is_cancelled() {
            let outcome = self.deliver_some().await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                tracing::warn!(error = %error.with_causes(), "the sender cannot deliver and tries again");
            }
            reachable = outcome.is_ok();
            let pause = async {
                match outcome {
                    Ok(0) => self.source.wait(TOPIC, self.settings.poll).await,
                    Ok(taken) if taken >= self.settings.batch_max => {}
                    Ok(_) => tokio::time::sleep(LINGER).await,
                    Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = closing.cancelled() => {}
            }
        }
        self.source.close().await;
    }

    /// Takes and delivers one batch, and says how many messages it took.
    async fn deliver_some(&self) -> Result<usize> {
        let SenderSettings { batch_max, visibility, .. } = self.settings;
        let MessageClaim { messages, receipt } = self.source.claim(TOPIC, batch_max, visibility).await?;
        let taken = messages.len();
        if taken == 0 {
            return Ok(0);
        }
        // Writing lines blocks when whoever reads them is slow; that must not hold up the API.
        let sender = self.clone();
        let settlement = tokio::task::spawn_blocking(move || sender.deliver(&messages))
            .await
            .map_err(|panic| Error::failed("sender", panic))?;
        let settlement = match settlement {
            Ok(settlement) => settlement,
            // Lines that did not get out leave their messages where they are, for whoever comes next.
            Err(error) => {
                self.source.settle(&receipt, Settlement::default()).await?;
                return Err(Error::unavailable("standard output", error));
            }
        };
        if !self.source.settle(&receipt, settlement).await? {
            tracing::warn!("some messages were delivered too late to be settled and will be delivered again");
        }
        Ok(taken)
    }

    fn deliver(&self, messages: &[Message]) -> std::io::Result<Settlement> {
        let mut settlement = Settlement::default();
        let mut lines = Lines::begin(self.format, self.torn.load(Ordering::Relaxed));
        for message in messages {
            match sms::decode(&message.payload) {
                Ok(event) => {
                    lines.add(&event);
                    settlement.done.push(message.position);
                }
                Err(error) => {
                    tell_of_malformed(message, &error);
                    settlement.dead.push((message.position, format!("malformed event: {error}")));
                }
            }
        }
        let written = lines.write();
        self.torn.store(written.is_err(), Ordering::Relaxed);
        written?;
        self.sent.inc_by(settlement.done.len() as u64);
        self.malformed.inc_by(settlement.dead.len() as u64);
        Ok(settlement)
    }
}

fn tell_of_malformed(message: &Message, error: &dyn std::error::Error) {
    let Message { position, key, payload, .. } = message;
    let shown = String::from_utf8_lossy(&payload[..payload.len().min(SHOWN_BYTES)]);
    tracing::error!(
        target: "weir::sender",
        key, payload = ?shown, %error, shard = position.shard, id = position.id,
        "malformed event kept as a dead letter"
    );
}
