//! Parses the replies of the sale scripts. Each parser returns `None` for a reply that its script cannot give.

use std::time::Duration;

use redis::Value;
use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, Sale, SaleState, Sku, Terms};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{BuyOutcome, Product, ProductId, Purchase, ThrottledBy};

/// The reply of `sale_buy` for one sale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BuyReply {
    /// Redis has no sale under the present run; it must be rebuilt from the store.
    Untrusted,
    /// One outcome for each buyer, and for each unit that was sold the id of its stream entry.
    Decided(Vec<BuyOutcome>, Vec<String>),
}

/// A sale as Redis has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeekedSale {
    /// Redis's time.
    pub(super) now: Timestamp,
    /// The sale, or `None` if Redis has none under the present run.
    pub(super) product: Option<Product>,
    /// Purchases in the stream, which wait to be recorded.
    pub(super) waiting: u64,
}

/// An entry of a sale's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StreamEntry {
    pub(super) id: String,
    /// The purchase, or `None` if the entry is malformed.
    pub(super) purchase: Option<Purchase>,
    /// All fields of the entry as JSON.
    pub(super) json: String,
}

pub(super) fn parse_buy(value: &Value, count: usize) -> Option<BuyReply> {
    let items = array(value)?;
    if integer(items.first()?)? == 0 {
        return Some(BuyReply::Untrusted);
    }
    let [_, product, now, stock, entry_ids, answers @ ..] = items else { return None };
    let entry_ids: Vec<String> = array(entry_ids)?.iter().map(text).collect::<Option<_>>()?;
    let (product, at) = (ProductId(integer(product)?), time(now)?);
    let stock = u32::try_from(integer(stock)?).unwrap_or(0);
    let outcome = |answer: &Value| {
        let Some(number) = integer(answer) else { return parse_throttled(&text(answer)?) };
        Some(match number {
            0 => BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased),
            -1 => BuyOutcome::Refused(PurchaseRefusal::SoldOut),
            -2 => BuyOutcome::Refused(PurchaseRefusal::NotActive),
            number => {
                let receipt = PurchaseReceipt { number: u32::try_from(number).ok()?, at };
                BuyOutcome::Bought { product, receipt, stock }
            }
        })
    };
    let outcomes: Vec<BuyOutcome> = answers.iter().map(outcome).collect::<Option<_>>()?;
    // `stock` is what is left after the batch. Each outcome gets the stock right after its own purchase.
    let sold = outcomes.iter().filter(|outcome| matches!(outcome, BuyOutcome::Bought { .. })).count();
    let mut left = stock.saturating_add(u32::try_from(sold).unwrap_or(u32::MAX));
    let outcomes = outcomes.into_iter().map(|outcome| match outcome {
        BuyOutcome::Bought { product, receipt, .. } => {
            left = left.saturating_sub(1);
            BuyOutcome::Bought { product, receipt, stock: left }
        }
        other => other,
    });
    let outcomes: Vec<BuyOutcome> = outcomes.collect();
    (outcomes.len() == count && entry_ids.len() == sold).then_some(BuyReply::Decided(outcomes, entry_ids))
}

/// Parses `user:` or `address:` and the milliseconds to wait.
fn parse_throttled(answer: &str) -> Option<BuyOutcome> {
    let (by, millis) = answer.split_once(':')?;
    let by = match by {
        "user" => ThrottledBy::User,
        "address" => ThrottledBy::Address,
        _ => return None,
    };
    Some(BuyOutcome::Throttled { by, retry_after: Duration::from_millis(millis.parse().ok()?) })
}

pub(super) fn parse_peek(value: &Value, sku: &Sku) -> Option<PeekedSale> {
    let items = array(value)?;
    let now = time(items.get(1)?)?;
    let [_, _, id, name, stock, start, end, created, sold, state, reason, waiting] = items else {
        return Some(PeekedSale { now, product: None, waiting: 0 });
    };
    let units = u32::try_from(integer(stock)?).ok()?;
    let terms = Terms::new(&text(name)?, units, time(start)?, time(end)?).ok()?;
    let reason = text(reason)?;
    let state = SaleState::parse(&text(state)?, Some(reason.as_str()).filter(|reason| !reason.is_empty()))?;
    let sold = u32::try_from(integer(sold)?).ok()?;
    let product = Product {
        id: ProductId(integer(id)?),
        sku: sku.clone(),
        sale: Sale { terms, sold, state },
        created_at: time(created)?,
    };
    let waiting = integer(waiting)?.unsigned_abs();
    Some(PeekedSale { now, product: Some(product), waiting })
}

/// Returns the purchase that `sale_find` found, if any. The outer `None` also means that Redis has no sale under the present run.
pub(super) fn parse_find(value: &Value) -> Option<Option<PurchaseReceipt>> {
    match array(value)? {
        [_, purchase] => Some(Some(receipt(&text(purchase)?)?)),
        [kind] if integer(kind)? == 1 => Some(None),
        _ => None,
    }
}

/// Returns the length of a stream and its oldest entries.
pub(super) fn parse_entries(value: &Value) -> Option<(usize, Vec<StreamEntry>)> {
    let entry = |fields: &[Value]| {
        let [id, product, user, number, at, json] = fields else { return None };
        let purchase = || {
            let receipt = PurchaseReceipt { number: u32::try_from(integer(number)?).ok()?, at: time(at)? };
            let buyer = UserId::parse(text(user)?).ok()?;
            Some(Purchase { product: ProductId(integer(product)?), buyer, receipt })
        };
        Some(StreamEntry { id: text(id)?, purchase: purchase(), json: lossy_text(json)? })
    };
    let (waiting, entries) = array(value)?.split_first()?;
    let waiting = usize::try_from(integer(waiting)?).ok()?;
    Some((waiting, entries.chunks(6).map(entry).collect::<Option<_>>()?))
}

/// Returns a page of a sale's purchases: the product, the cursor of the next page, and the purchases.
pub(super) fn parse_buyers(value: &Value) -> Option<(ProductId, String, Vec<Purchase>)> {
    let [_, cursor, product, pairs @ ..] = array(value)? else { return None };
    let product = ProductId(integer(product)?);
    let purchase = |pair: &[Value]| {
        let [user, purchase] = pair else { return None };
        let buyer = UserId::parse(text(user)?).ok()?;
        Some(Purchase { product, buyer, receipt: receipt(&text(purchase)?)? })
    };
    let purchases = pairs.chunks(2).map(purchase).collect::<Option<_>>()?;
    Some((product, text(cursor)?, purchases))
}

/// Parses `number:time`.
fn receipt(text: &str) -> Option<PurchaseReceipt> {
    let (number, at) = text.split_once(':')?;
    Some(PurchaseReceipt { number: number.parse().ok()?, at: Timestamp::from_micros(at.parse().ok()?) })
}

fn array(value: &Value) -> Option<&[Value]> {
    if let Value::Array(items) = value { Some(items) } else { None }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Like [`text`], but replaces invalid UTF-8.
fn lossy_text(value: &Value) -> Option<String> {
    let Value::BulkString(bytes) = value else { return None };
    Some(String::from_utf8_lossy(bytes).into_owned())
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        other => text(other)?.parse().ok(),
    }
}

fn time(value: &Value) -> Option<Timestamp> {
    integer(value).map(Timestamp::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(items: &[&str]) -> Value {
        Value::Array(items.iter().map(|item| Value::BulkString(item.as_bytes().to_vec())).collect())
    }

    #[test]
    fn stock_counts_down_within_a_batch() {
        let reply = |entries: &[&str]| {
            let Value::Array(mut items) = list(&["1", "7", "1000", "3", "5", "0", "6", "-2"]) else {
                panic!("a list")
            };
            items.insert(4, list(entries));
            Value::Array(items)
        };
        assert_eq!(parse_buy(&reply(&["1-1"]), 4), None, "one entry for each unit");
        let reply = reply(&["1-1", "1-2"]);
        let Some(BuyReply::Decided(outcomes, entry_ids)) = parse_buy(&reply, 4) else { panic!("a decision") };
        assert_eq!(entry_ids, ["1-1", "1-2"]);
        let stocks = outcomes.iter().map(|outcome| match outcome {
            BuyOutcome::Bought { stock, .. } => Some(*stock),
            _ => None,
        });
        assert_eq!(stocks.collect::<Vec<_>>(), [Some(4), None, Some(3), None]);
        assert_eq!(parse_buy(&reply, 3), None, "one outcome for each buyer");
        assert_eq!(parse_buy(&list(&["0"]), 4), Some(BuyReply::Untrusted));
    }

    #[test]
    fn attempts_that_are_one_too_many_say_how_long_to_wait() {
        let reply = |answer: &str| {
            let Value::Array(mut items) = list(&["1", "7", "1000", "3", answer, "0"]) else {
                panic!("a list")
            };
            items.insert(4, list(&[]));
            parse_buy(&Value::Array(items), 2)
        };
        for (answer, by, millis) in
            [("user:350", ThrottledBy::User, 350), ("address:1", ThrottledBy::Address, 1)]
        {
            let throttled = BuyOutcome::Throttled { by, retry_after: Duration::from_millis(millis) };
            let outcomes = vec![throttled, BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased)];
            assert_eq!(reply(answer), Some(BuyReply::Decided(outcomes, Vec::new())));
        }
        for bad in ["user", "user:", "user:x", "else:1", ""] {
            assert_eq!(reply(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_malformed_entry_keeps_its_id() {
        let reply = list(&["5", "1-1", "7", "u", "3", "9", "{}", "1-2", "", "", "", "", "{\"a\":\"b\"}"]);
        let (length, entries) = parse_entries(&reply).expect("a list of entries");
        assert_eq!(length, 5);
        assert!(entries[0].purchase.is_some());
        let bad = StreamEntry { id: "1-2".to_owned(), purchase: None, json: "{\"a\":\"b\"}".to_owned() };
        assert_eq!(entries[1], bad);
    }
}
