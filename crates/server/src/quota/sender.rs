//! The sender: claims accepted messages from the queue and delivers them, in order for each user.
//!
//! Delivering a message means posting it to the provider of `sender.url` (`provider.rs`), if there is one, and writing the log
//! line `SMS SENT`. A message is settled only after its line is written, so a crash in between repeats the message instead of
//! losing it. A message that cannot be decoded becomes a dead letter, and the sender continues with the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::digest::{Context, SHA256};
use tokio_util::sync::CancellationToken;
use weir_queue::sms::SmsEvent;
use weir_queue::{Message, MessageClaim, MessageSource, Settlement, sms};
use weir_store::quota::TOPIC;
use weir_store::{Error, Result};

use super::events::{ClaimExpired, DeliveryFailed, MessageMalformed, MessagesDelivered};
use super::metrics::QuotaMetrics;
use super::provider::{Provider, ProviderDependencies};
use super::settings::SenderSettings;
use super::sms_log::SmsLog;
use crate::settings::Settings;
use crate::settings::log::LogFormat;

/// The pause after a batch that was not full, so that the next one is large enough to be worth its commits. A message
/// that arrives on an idle queue is delivered at once.
const LINGER: Duration = Duration::from_millis(20);
/// The pause after a failure.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub(crate) struct Sender {
    source: Arc<dyn MessageSource>,
    settings: SenderSettings,
    provider: Option<Arc<Provider>>,
    format: LogFormat,
    metrics: QuotaMetrics,
    /// Whether the last write failed, perhaps in the middle of a line.
    has_partial_line: Arc<AtomicBool>,
}

impl Sender {
    #[must_use]
    pub(crate) fn new(
        source: Arc<dyn MessageSource>,
        provider: ProviderDependencies,
        settings: &Settings,
        metrics: &QuotaMetrics,
    ) -> Self {
        Self {
            source,
            settings: settings.sender.clone(),
            provider: Provider::new(provider, &settings.sender, metrics).map(Arc::new),
            format: settings.log.format,
            metrics: metrics.clone(),
            has_partial_line: Arc::default(),
        }
    }

    /// Delivers until `closing` is cancelled, then finishes the claimed batch.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut is_working = true;
        while !closing.is_cancelled() {
            let outcome = self.deliver_batch(&closing).await;
            if let Err(error) = &outcome
                && is_working
            {
                DeliveryFailed { error }.emit();
            }
            is_working = outcome.is_ok();
            let pause = async {
                match outcome {
                    Ok(0) => self.source.wait(TOPIC, self.settings.poll).await,
                    Ok(claimed) if claimed >= self.settings.batch_max => {}
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

    /// Claims and delivers one batch. Returns how many messages it had.
    async fn deliver_batch(&self, closing: &CancellationToken) -> Result<usize> {
        let SenderSettings { batch_max, visibility, poll, .. } = self.settings;
        let claim_max = self.provider.as_ref().map_or(batch_max, |provider| provider.claim_max());
        if claim_max == 0 {
            tokio::time::sleep(poll).await;
            return Ok(0);
        }
        let claimed_at = Instant::now();
        let MessageClaim { messages, receipt } = self.source.claim(TOPIC, claim_max, visibility).await?;
        let claimed = messages.len();
        if claimed == 0 {
            return Ok(0);
        }
        let (messages, mut settlement) = match &self.provider {
            Some(provider) => provider.post_claimed(messages, claimed_at, closing).await,
            None => (messages, Settlement::default()),
        };
        // Writing blocks while the reader of standard output is slow. That must not block the API's threads.
        let sender = self.clone();
        let logged = tokio::task::spawn_blocking(move || sender.log(&messages))
            .await
            .map_err(|panic| Error::failed("sender", panic))?;
        match logged {
            Ok(logged) => {
                settlement.done.extend(logged.done);
                settlement.dead.extend(logged.dead);
            }
            // Messages whose lines were not written stay in the queue and can be claimed again.
            Err(error) => {
                self.source.settle(&receipt, settlement).await?;
                return Err(Error::unavailable("standard output", error));
            }
        }
        if !self.source.settle(&receipt, settlement).await? {
            ClaimExpired { messages: claimed }.emit();
        }
        Ok(claimed)
    }

    /// Writes the log lines of messages, and finds those that are malformed.
    fn log(&self, messages: &[Message]) -> std::io::Result<Settlement> {
        let mut settlement = Settlement::default();
        let mut log = SmsLog::new(self.format, self.has_partial_line.load(Ordering::Relaxed));
        for message in messages {
            match sms::decode(&message.payload) {
                Ok(event) => {
                    log.add(&event, message_id(&event, message));
                    settlement.done.push(message.position);
                }
                Err(error) => {
                    MessageMalformed { message, error: &error }.emit(&self.metrics);
                    settlement.dead.push((message.position, format!("malformed event: {error}")));
                }
            }
        }
        let written = log.write();
        self.has_partial_line.store(written.is_err(), Ordering::Relaxed);
        written?;
        MessagesDelivered { count: settlement.done.len() }.emit(&self.metrics);
        if let Some(provider) = &self.provider {
            provider.mark_logged(messages);
        }
        Ok(settlement)
    }
}

/// The id of a message. Other producers need not give one: then it is derived from the message and its position, so that it
/// stays the same however often the message is claimed.
pub(super) fn message_id(event: &SmsEvent<'_>, message: &Message) -> uuid::Uuid {
    event.message_id.unwrap_or_else(|| {
        let mut context = Context::new(&SHA256);
        context.update(&message.position.shard.to_be_bytes());
        context.update(&message.position.id.to_be_bytes());
        context.update(&message.payload);
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(context.finish().as_ref()).for_each(|(byte, hash)| *byte = *hash);
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    })
}
