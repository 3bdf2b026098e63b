//! What the scripts of sale answer.

use redis::Value;
use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, Sale, SaleState, Sku, Terms};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{BuyOutcome, Product, ProductId, Purchase};

/// The answer of `sale_buy` for one sale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bought {
    /// Nothing that may be trusted.
    Untrusted,
    /// One outcome for each buyer, and for each unit that was sold its entry in the stream.
    Decided(Vec<BuyOutcome>, Vec<String>),
}

/// How a sale stands in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peeked {
    /// Redis's time.
    pub(super) now: Timestamp,
    /// The sale; none when there is nothing that may be trusted.
    pub(super) product: Option<Product>,
    /// Purchases that wait to be written down.
    pub(super) waiting: u64,
}

/// Something in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its name there.
    pub(super) name: String,
    /// The purchase; none when it cannot be read.
    pub(super) purchase: Option<Purchase>,
    /// All it says, as JSON.
    pub(super) text: String,
}

pub(super) fn bought(value: &Value, count: usize) -> Option<Bought> {
    let items = array(value)?;
    if integer(items.first()?)? == 0 {
        return Some(Bought::Untrusted);
    }
    let [_, product, now, stock, entries, answers @ ..] = items else { return None };
    let entries: Vec<String> = array(entries)?.iter().map(text).collect::<Option<_>>()?;
    let (product, at) = (ProductId(integer(product)?), time(now)?);
    let stock = u32::try_from(integer(stock)?).unwrap_or(0);
    let outcome = |answer: &Value| {
        Some(match integer(answer)? {
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
    // Units count down to what was left in the end, so that each outcome says what was left then.
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
    (outcomes.len() == count && entries.len() == sold).then_some(Bought::Decided(outcomes, entries))
}

pub(super) fn peeked(value: &Value, sku: &Sku) -> Option<Peeked> {
    let items = array(value)?;
    let now = time(items.get(1)?)?;
    let [_, _, id, name, stock, start, end, created, sold, state, reason, waiting] = items else {
        return Some(Peeked { now, product: None, waiting: 0 });
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
    Some(Peeked { now, product: Some(product), waiting })
}

/// A purchase that `sale_find` has found: none for nothing that may be trusted.
pub(super) fn found(value: &Value) -> Option<Option<PurchaseReceipt>> {
    match array(value)? {
        [_, purchase] => Some(Some(receipt(&text(purchase)?)?)),
        [kind] if integer(kind)? == 1 => Some(None),
        _ => None,
    }
}

/// How much is in a stream, and its oldest entries.
pub(super) fn entries(value: &Value) -> Option<(usize, Vec<Entry>)> {
    let entry = |fields: &[Value]| {
        let [name, product, user, number, at, all] = fields else { return None };
        let purchase = || {
            let receipt = PurchaseReceipt { number: u32::try_from(integer(number)?).ok()?, at: time(at)? };
            let buyer = UserId::parse(text(user)?).ok()?;
            Some(Purchase { product: ProductId(integer(product)?), buyer, receipt })
        };
        Some(Entry { name: text(name)?, purchase: purchase(), text: shown(all)? })
    };
    let (waiting, entries) = array(value)?.split_first()?;
    let waiting = usize::try_from(integer(waiting)?).ok()?;
    Some((waiting, entries.chunks(6).map(entry).collect::<Option<_>>()?))
}

/// A part of a sale's purchases: the product, where to go on, and the purchases.
pub(super) fn buyers(value: &Value) -> Option<(ProductId, String, Vec<Purchase>)> {
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

/// `number:time`.
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

/// The same of what may be no text: bytes that are none are replaced.
fn shown(value: &Value) -> Option<String> {
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
        let answer = |entries: &[&str]| {
            let Value::Array(mut items) = list(&["1", "7", "1000", "3", "5", "0", "6", "-2"]) else {
                panic!("a list")
            };
            items.insert(4, list(entries));
            Value::Array(items)
        };
        assert_eq!(bought(&answer(&["1-1"]), 4), None, "one entry for each unit");
        let answer = answer(&["1-1", "1-2"]);
        let Some(Bought::Decided(outcomes, entries)) = bought(&answer, 4) else { panic!("an answer") };
        assert_eq!(entries, ["1-1", "1-2"]);
        let stocks = outcomes.iter().map(|outcome| match outcome {
            BuyOutcome::Bought { stock, .. } => Some(*stock),
            _ => None,
        });
        assert_eq!(stocks.collect::<Vec<_>>(), [Some(4), None, Some(3), None]);
        assert_eq!(bought(&answer, 3), None, "one answer for each buyer");
        assert_eq!(bought(&list(&["0"]), 4), Some(Bought::Untrusted));
    }

    #[test]
    fn an_entry_that_cannot_be_read_keeps_its_name() {
        let entries =
            entries(&list(&["5", "1-1", "7", "u", "3", "9", "{}", "1-2", "", "", "", "", "{\"a\":\"b\"}"]));
        let (waiting, entries) = entries.expect("a list of entries");
        assert_eq!(waiting, 5);
        assert!(entries[0].purchase.is_some());
        let bad = Entry { name: "1-2".to_owned(), purchase: None, text: "{\"a\":\"b\"}".to_owned() };
        assert_eq!(entries[1], bad);
    }
}
