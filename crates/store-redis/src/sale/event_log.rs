//! The log of events that all servers on one Redis share (`sale_log.lua`): the same event has the same id on each of them.

use redis::Value;
use weir_core::sale::{EndReason, SaleChange, SaleStage, SaleState, Sku};
use weir_store::Result;
use weir_store::sale::{EventId, EventPage, LoggedEvent, ProductId, Publication};

use super::{SharedSales, malformed_reply};
use crate::client::KeyCall;
use crate::script::Script;

/// The prefix of the log's keys. No sku has an underscore.
const LOG: &str = "sale:{_events}";

impl SharedSales {
    /// Appends what the publications add to the log, and reads what follows `after`.
    pub(super) async fn publish(
        &self,
        publications: &[Publication],
        after: Option<EventId>,
    ) -> Result<EventPage> {
        let known = after.map(|id| [id.epoch.to_string(), id.number.to_string()]).unwrap_or_default();
        let arguments = known.into_iter().chain(publications.iter().flat_map(arguments)).collect();
        let replies = self.call(Script::SaleLog, &[], &[KeyCall { key: LOG.to_owned(), arguments }]).await?;
        replies.first().and_then(parse_page).ok_or_else(malformed_reply)
    }

    /// Removes the events of a deleted product. If it fails, a server that starts later may send them once more.
    pub(super) async fn remove_events(&self, product: i64) {
        let calls = [KeyCall { key: LOG.to_owned(), arguments: vec![product.to_string()] }];
        let _ = self.call(Script::SaleUnlog, &[], &calls).await;
    }
}

fn arguments(publication: &Publication) -> Vec<String> {
    let Publication { sku, product, from, to, initial_stock, stocks_max } = publication;
    let mut arguments = vec![product.0.to_string(), sku.to_string()];
    for stage in [from, to] {
        let reason = stage.state.end_reason().map_or("", EndReason::as_str);
        arguments.extend([stage.state.as_str().to_owned(), reason.to_owned(), stage.stock.to_string()]);
    }
    arguments.extend([initial_stock.get().to_string(), stocks_max.to_string()]);
    arguments
}

fn parse_page(reply: &Value) -> Option<EventPage> {
    let Value::Array(items) = reply else { return None };
    let [epoch, number, trimmed, Value::Array(events), Value::Array(stages)] = &items[..] else {
        return None;
    };
    let epoch = text(epoch)?.parse().ok()?;
    let id = |number: &Value| Some(EventId { epoch, number: text(number)?.parse().ok()? });
    let events = events.iter().map(|event| parse_event(epoch, text(event)?)).collect::<Option<_>>()?;
    let (stages, rest) = stages.as_chunks::<3>();
    let stage = |[state, reason, stock]: &[Value; 3]| parse_stage(text(state)?, text(reason)?, text(stock)?);
    let stages = stages.iter().map(stage).collect::<Option<_>>()?;
    rest.is_empty().then_some(EventPage { dropped: id(trimmed)?, latest: id(number)?, events, stages })
}

/// Parses the events of a message on the channel.
pub(super) fn parse_events(epoch: &str, entries: &[String]) -> Option<Vec<LoggedEvent>> {
    let epoch = epoch.parse().ok()?;
    entries.iter().map(|entry| parse_event(epoch, entry)).collect()
}

fn parse_event(epoch: u64, entry: &str) -> Option<LoggedEvent> {
    let mut fields = entry.split(' ');
    let mut next = || fields.next();
    let (number, product, sku, kind) = (next()?, next()?, next()?, next()?);
    let (state, reason, stock) = (next()?, next()?, next()?);
    let stage = parse_stage(state, if reason == "-" { "" } else { reason }, stock)?;
    let change = match kind {
        "stock" => SaleChange::Stock(stage.stock),
        "state" => SaleChange::State(stage.state),
        _ => return None,
    };
    let id = EventId { epoch, number: number.parse().ok()? };
    let (sku, product) = (Sku::parse(sku).ok()?, ProductId(product.parse().ok()?));
    Some(LoggedEvent { id, sku, product, change, stage })
}

fn parse_stage(state: &str, reason: &str, stock: &str) -> Option<SaleStage> {
    let state = SaleState::parse(state, Some(reason).filter(|reason| !reason.is_empty()))?;
    Some(SaleStage { state, stock: stock.parse().ok()? })
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_parsed_and_malformed_ones_are_not() {
        let entries =
            ["3 7 W stock ACTIVE - 9".to_owned(), "4 7 W state ENDED ENDED_BY_OPERATOR 9".to_owned()];
        let events = parse_events("12", &entries).unwrap();
        assert_eq!(events[0].id, EventId { epoch: 12, number: 3 });
        assert_eq!((events[0].change, events[0].stage.state), (SaleChange::Stock(9), SaleState::Active));
        let ended = SaleState::Ended(EndReason::EndedByOperator);
        assert_eq!(
            (events[1].change, events[1].stage),
            (SaleChange::State(ended), SaleStage { state: ended, stock: 9 })
        );
        for bad in [
            "",
            "3 7 W",
            "x 7 W stock ACTIVE - 9",
            "3 7 W_ stock ACTIVE - 9",
            "3 7 W else ACTIVE - 9",
            "3 7 W stock ENDED - 9",
            "3 7 W stock ACTIVE - -9",
        ] {
            assert_eq!(parse_events("12", &[bad.to_owned()]), None, "{bad}");
        }
    }
}
