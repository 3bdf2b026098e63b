//! Random histories against a naive model, which stores a set of buyers for each product.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weir_core::sale::TermsChange;
use weir_core::{Clock, Timestamp};
use weir_store::sale::{Buy, ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome};

use super::fixtures::{
    buy_batch, buy_command, create, expect_books, find_product, outcome_letters, sku, terms_at,
};
use crate::HasSales;

/// A product in the model.
struct Row {
    stock: usize,
    start: Timestamp,
    end: Timestamp,
    is_ended: bool,
    buyers: BTreeSet<String>,
}

impl Row {
    fn is_active(&self, now: Timestamp) -> bool {
        !self.is_ended && self.buyers.len() < self.stock && self.start <= now && now < self.end
    }
}

#[derive(Default)]
struct Model(BTreeMap<String, Row>);

impl Model {
    fn letter(&mut self, name: &str, buyer: &str, now: Timestamp) -> char {
        let Some(row) = self.0.get_mut(name) else { return 'U' };
        if row.buyers.contains(buyer) {
            'A'
        } else if row.buyers.len() == row.stock {
            'S'
        } else if !row.is_active(now) {
            'N'
        } else {
            row.buyers.insert(buyer.to_owned());
            'B'
        }
    }
}

/// Applies one random step to the engine and the model.
async fn step<H: HasSales>(h: &H, model: &mut Model, rng: &mut fastrand::Rng) {
    let now = h.clock().now();
    let name = ["A", "B", "C"][rng.usize(..3)];
    match rng.u32(..20) {
        0..=2 => h.clock().advance(Duration::from_secs(rng.u64(1..20))),
        3 | 4 => {
            let (start, stock) = (now.plus(Duration::from_secs(rng.u64(1..15))), rng.u32(1..9));
            let end = start.plus(Duration::from_secs(rng.u64(1..60)));
            let outcome = create(h, name, terms_at(stock, start, end)).await;
            let row = Row { stock: stock as usize, start, end, is_ended: false, buyers: BTreeSet::new() };
            match outcome {
                CreateOutcome::Created(_) => assert!(model.0.insert(name.to_owned(), row).is_none()),
                CreateOutcome::Exists => assert!(model.0.contains_key(name)),
                CreateOutcome::Refused(problem) => panic!("the sale starts in the future: {problem}"),
            }
        }
        5 => {
            let deleted =
                h.sales().delete_product(&sku(name), false).await.expect("delete_product must succeed");
            assert_eq!(deleted == DeleteOutcome::Deleted, model.0.remove(name).is_some());
        }
        6 => {
            let stock = rng.u32(1..9);
            let change = TermsChange { initial_stock: Some(stock), ..TermsChange::default() };
            let outcome = h.sales().change_product(&sku(name), change).await.expect("an answer");
            match (model.0.get_mut(name), outcome) {
                (None, ChangeOutcome::UnknownSku) => {}
                (Some(row), ChangeOutcome::Changed(_)) if now < row.start => row.stock = stock as usize,
                (Some(row), ChangeOutcome::Refused(_)) if now >= row.start => {}
                (_, outcome) => panic!("{name} must not get {outcome:?}"),
            }
        }
        7 => {
            let outcome = h.sales().end_sale(&sku(name)).await.expect("end_sale must succeed");
            match (model.0.get_mut(name), outcome) {
                (None, EndOutcome::UnknownSku) => {}
                (Some(row), EndOutcome::Ended(_)) if row.is_active(now) => row.is_ended = true,
                (Some(row), EndOutcome::NotActive) if !row.is_active(now) => {}
                (_, outcome) => panic!("{name} must not get {outcome:?}"),
            }
        }
        8 => {
            let end = now.plus(Duration::from_secs(rng.u64(1..60)));
            let outcome = h.sales().extend_sale(&sku(name), end).await.expect("extend_sale must succeed");
            match (model.0.get_mut(name), outcome) {
                (None, ChangeOutcome::UnknownSku) => {}
                (Some(row), outcome) => {
                    let has_ended = row.is_ended || row.buyers.len() == row.stock || now >= row.end;
                    let is_changed = matches!(outcome, ChangeOutcome::Changed(_));
                    assert_eq!(is_changed, !has_ended && end > row.end, "{name}: {outcome:?}");
                    if is_changed {
                        row.end = end;
                    }
                }
                (None, outcome) => panic!("{name} must not get {outcome:?}"),
            }
        }
        _ => {
            let pick = |rng: &mut fastrand::Rng| (["A", "B", "C", "X"][rng.usize(..4)], rng.u32(..12));
            let picks: Vec<_> = (0..rng.usize(1..8)).map(|_| pick(rng)).collect();
            let batch: Vec<Buy> =
                picks.iter().map(|(name, buyer)| buy_command(name, &format!("b{buyer}"))).collect();
            let letters = outcome_letters(&buy_batch(h, batch).await);
            let expected: String =
                picks.iter().map(|(name, buyer)| model.letter(name, &format!("b{buyer}"), now)).collect();
            assert_eq!(letters, expected, "{picks:?}");
        }
    }
}

pub async fn random_histories_match_the_naive_model<H: HasSales>() {
    for seed in 0..4 {
        let h = H::open().await;
        let (mut model, mut rng) = (Model::default(), fastrand::Rng::with_seed(seed));
        for _ in 0..120 {
            step(&h, &mut model, &mut rng).await;
        }
        for (name, row) in &model.0 {
            let product = find_product(&h, name).await.expect("the product exists");
            assert_eq!(product.sale.sold as usize, row.buyers.len(), "seed {seed}, {name}");
        }
        expect_books(&h, model.0.values().map(|row| row.buyers.len() as u64).sum()).await;
    }
}
