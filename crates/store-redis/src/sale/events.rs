//! The events that scripts publish on `sale:events`: every server learns at once what any of them has sold.

use std::sync::atomic::Ordering;

use serde::Deserialize;
use weir_core::sale::{EndReason, SaleState, Sku};
use weir_store::sale::{ProductId, SaleEvent};

use super::SharedSales;
use super::event_log::parse_events;
use crate::pubsub::ChannelEvent;

const CHANNEL: &str = "sale:events";

/// One message on the channel.
#[derive(Debug, Deserialize)]
struct ChannelMessage {
    event: String,
    product: Option<String>,
    data: EventData,
    /// With `log`: events of one epoch.
    epoch: Option<String>,
    #[serde(default)]
    entries: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct EventData {
    sku: String,
    stock: Option<u32>,
    state: Option<String>,
    reason: Option<String>,
    /// `operator` if an operator has ended the sale; the reason is then one that earlier versions know.
    #[serde(rename = "endedBy")]
    ended_by: Option<String>,
}

impl SharedSales {
    /// Subscribes to the channel and passes its events on, until the future is dropped.
    pub(super) async fn follow_events(&self, hear: &(dyn Fn(SaleEvent) + Send + Sync)) {
        self.redis
            .subscribe(CHANNEL, |event| {
                let event = match event {
                    ChannelEvent::Subscribed => Some(SaleEvent::Subscribed),
                    ChannelEvent::Lost => Some(SaleEvent::Lost),
                    ChannelEvent::Message(message) => parse(message),
                };
                match event {
                    Some(event) => {
                        self.apply(&event);
                        hear(event);
                    }
                    None => tracing::debug!(channel = CHANNEL, "ignored a malformed message"),
                }
            })
            .await;
    }

    /// Updates this server's own state. Must run before the event is passed on: a reader that reacts to it must not get the
    /// outdated catalogue.
    fn apply(&self, event: &SaleEvent) {
        match event {
            SaleEvent::Subscribed => {
                self.is_subscribed.store(true, Ordering::SeqCst);
                self.product_events.fetch_add(1, Ordering::SeqCst);
            }
            SaleEvent::ProductChanged { .. } => {
                self.product_events.fetch_add(1, Ordering::SeqCst);
            }
            SaleEvent::Lost => self.is_subscribed.store(false, Ordering::SeqCst),
            SaleEvent::Sold { .. } => self.entry_added.notify_one(),
            SaleEvent::StateChanged { .. } | SaleEvent::Logged(_) => {}
        }
    }
}

/// Parses a message. Returns `None` for one that no script publishes.
fn parse(message: &[u8]) -> Option<SaleEvent> {
    let ChannelMessage { event, product, data, epoch, entries } = serde_json::from_slice(message).ok()?;
    if event == "log" {
        return Some(SaleEvent::Logged(parse_events(&epoch?, &entries)?));
    }
    let sku = Sku::parse(data.sku).ok()?;
    let product = || Some(ProductId(product?.parse().ok()?));
    match event.as_str() {
        "stock-update" => Some(SaleEvent::Sold { sku, product: product()?, stock: data.stock? }),
        "state-change" => {
            let state = match data.ended_by.as_deref() {
                Some("operator") => SaleState::Ended(EndReason::EndedByOperator),
                _ => SaleState::parse(&data.state?, data.reason.as_deref())?,
            };
            Some(SaleEvent::StateChanged { sku, product: product()?, state })
        }
        "product-change" => Some(SaleEvent::ProductChanged { sku }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_parsed_and_malformed_ones_are_ignored() {
        let sku = || Sku::parse("W").unwrap();
        let product = ProductId(7);
        let sold = br#"{"event":"stock-update","product":"7","data":{"sku":"W","stock":3}}"#;
        assert_eq!(parse(sold), Some(SaleEvent::Sold { sku: sku(), product, stock: 3 }));
        let turned = br#"{"event":"state-change","product":"7","data":{"sku":"W","state":"ENDED","reason":"SOLD_OUT"}}"#;
        let state = SaleState::Ended(EndReason::SoldOut);
        assert_eq!(parse(turned), Some(SaleEvent::StateChanged { sku: sku(), product, state }));
        let ended = br#"{"event":"state-change","product":"7","data":{"sku":"W","state":"ENDED","reason":"TIME_EXPIRED","endedBy":"operator"}}"#;
        let state = SaleState::Ended(EndReason::EndedByOperator);
        assert_eq!(parse(ended), Some(SaleEvent::StateChanged { sku: sku(), product, state }));
        let changed = br#"{"event":"product-change","data":{"sku":"W"}}"#;
        assert_eq!(parse(changed), Some(SaleEvent::ProductChanged { sku: sku() }));
        for bad in [
            &b""[..],
            b"nonsense",
            b"\xff",
            br#"{"event":"stock-update","data":{"sku":"W","stock":3}}"#,
            br#"{"event":"stock-update","product":"7","data":{"sku":"W","stock":-1}}"#,
            br#"{"event":"state-change","product":"7","data":{"sku":"W","state":"ENDED"}}"#,
            br#"{"event":"else","product":"7","data":{"sku":"W"}}"#,
        ] {
            assert_eq!(parse(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }
}
