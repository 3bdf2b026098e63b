//! What the scripts tell on `sale:events`: how every server hears at once of what any of them has sold.

use std::sync::atomic::Ordering;

use serde::Deserialize;
use weir_core::sale::{SaleState, Sku};
use weir_store::sale::{ProductId, SaleEvent};

use super::Parts;
use crate::pubsub::ChannelEvent;

const CHANNEL: &str = "sale:events";

/// One message on the channel.
#[derive(Debug, Deserialize)]
struct ChannelMessage {
    event: String,
    product: Option<String>,
    data: Data,
}

#[derive(Debug, Deserialize)]
struct Data {
    sku: String,
    stock: Option<u32>,
    state: Option<String>,
    reason: Option<String>,
}

impl Parts {
    /// Tells what is said, for as long as this is waited for.
    pub(super) async fn follow_events(&self, hear: &(dyn Fn(SaleEvent) + Send + Sync)) {
        self.redis
            .listen(CHANNEL, |heard| {
                let news = match heard {
                    ChannelEvent::Begun => Some(SaleEvent::Subscribed),
                    ChannelEvent::Lost => Some(SaleEvent::Lost),
                    ChannelEvent::Said(message) => parse(message),
                };
                match news {
                    Some(news) => {
                        self.heed(&news);
                        hear(news);
                    }
                    None => tracing::debug!(channel = CHANNEL, "a message was not understood"),
                }
            })
            .await;
    }

    /// What is told is of use here, too. Before anybody else is told: whoever reads sales because of it must not be given
    /// what was remembered.
    fn heed(&self, news: &SaleEvent) {
        match news {
            SaleEvent::Subscribed => {
                self.is_told.store(true, Ordering::SeqCst);
                self.products_told.fetch_add(1, Ordering::SeqCst);
            }
            SaleEvent::ProductChanged { .. } => {
                self.products_told.fetch_add(1, Ordering::SeqCst);
            }
            SaleEvent::Lost => self.is_told.store(false, Ordering::SeqCst),
            SaleEvent::Sold { .. } => self.sold.notify_one(),
            SaleEvent::StateChanged { .. } => {}
        }
    }
}

/// What a message says; none for one that no script of ours sends.
fn parse(message: &[u8]) -> Option<SaleEvent> {
    let ChannelMessage { event, product, data } = serde_json::from_slice(message).ok()?;
    let sku = Sku::parse(data.sku).ok()?;
    let product = || Some(ProductId(product?.parse().ok()?));
    match event.as_str() {
        "stock-update" => Some(SaleEvent::Sold { sku, product: product()?, stock: data.stock? }),
        "state-change" => {
            let state = SaleState::parse(&data.state?, data.reason.as_deref())?;
            Some(SaleEvent::StateChanged { sku, product: product()?, state })
        }
        "product-change" => Some(SaleEvent::ProductChanged { sku }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use weir_core::sale::EndReason;

    use super::*;

    #[test]
    fn messages_are_understood_and_what_is_none_is_left_alone() {
        let sku = || Sku::parse("W").unwrap();
        let product = ProductId(7);
        let sold = br#"{"event":"stock-update","product":"7","data":{"sku":"W","stock":3}}"#;
        assert_eq!(parse(sold), Some(SaleEvent::Sold { sku: sku(), product, stock: 3 }));
        let turned = br#"{"event":"state-change","product":"7","data":{"sku":"W","state":"ENDED","reason":"SOLD_OUT"}}"#;
        let state = SaleState::Ended(EndReason::SoldOut);
        assert_eq!(parse(turned), Some(SaleEvent::StateChanged { sku: sku(), product, state }));
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
