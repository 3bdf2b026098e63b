//! Checks the invariants of the sale rule, and compares it with a model that stores a list of buyers and counts them
//! anew.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a model may panic; the test then fails"
)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::sale::{
    ChangeError, EndReason, PurchaseReceipt, PurchaseRefusal, Sale, SaleChange, SaleStage, SaleState, Stock,
    Terms, TermsChange, TermsError,
};

const START: i64 = 1_771_149_600;
const DURATION: i64 = 100;

fn at(offset: i64) -> Timestamp {
    Timestamp::from_seconds(START + offset)
}

fn sale(stock: u32) -> Sale {
    Sale::new(Terms::new("Widget", stock, at(0), at(DURATION)).unwrap())
}

/// Returns the expected outcome for a buyer, from the list of purchases; `seen` is the state observed last.
fn expected(
    bought: &BTreeMap<u8, PurchaseReceipt>,
    buyer: u8,
    stock: u32,
    seen: SaleState,
    now: Timestamp,
) -> Result<u32, PurchaseRefusal> {
    let sold = u32::try_from(bought.len()).unwrap();
    if bought.contains_key(&buyer) {
        Err(PurchaseRefusal::AlreadyPurchased)
    } else if sold == stock {
        Err(PurchaseRefusal::SoldOut)
    } else if seen.end_reason().is_some()
        || now >= at(DURATION)
        || (seen == SaleState::Upcoming && now < at(0))
    {
        Err(PurchaseRefusal::NotActive)
    } else {
        Ok(sold + 1)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// Buyers come in any order, and the clock may step back.
    #[test]
    fn nobody_buys_twice_nothing_is_oversold_and_the_end_is_final(
        stock in 1_u32..12,
        attempts in prop::collection::vec((0_u8..20, -20_i64..130), 1..80),
    ) {
        let mut sale = sale(stock);
        let mut bought: BTreeMap<u8, PurchaseReceipt> = BTreeMap::new();
        let mut seen = SaleState::Upcoming;
        for (buyer, offset) in attempts {
            let now = at(offset);
            let expected_outcome = expected(&bought, buyer, stock, seen, now);
            let answer = sale.sell(bought.contains_key(&buyer), now);
            prop_assert_eq!(answer.map(|receipt| receipt.number), expected_outcome);
            if let Ok(receipt) = answer {
                prop_assert_eq!(receipt.at, now);
                prop_assert_eq!(bought.insert(buyer, receipt), None, "one per buyer");
            }
            prop_assert!(sale.sold <= stock, "sold ≤ stock");
            prop_assert_eq!(sale.sold as usize, bought.len(), "count = purchases");
            prop_assert_eq!(sale.stock() + sale.sold, stock);
            prop_assert!(sale.state >= seen, "the state went back from {:?} to {:?}", seen, sale.state);
            if let SaleState::Ended(_) = seen {
                prop_assert_eq!(sale.state, seen, "the end is final, and so is its reason");
            }
            prop_assert_eq!(sale.stock() == 0, sale.state == SaleState::Ended(EndReason::SoldOut));
            seen = sale.state;
        }
        let numbers: BTreeSet<u32> = bought.values().map(|receipt| receipt.number).collect();
        prop_assert_eq!(numbers, (1..=sale.sold).collect::<BTreeSet<_>>(), "numbered from 1 without a gap");
    }

    #[test]
    fn the_next_transition_is_when_the_state_changes_and_not_before(stock in 1_u32..3, offset in -20_i64..130) {
        let sale = sale(stock);
        let now = at(offset);
        match sale.next_transition(now) {
            None => prop_assert!(matches!(sale.state_at(now), SaleState::Ended(_))),
            Some(transition) => {
                prop_assert!(transition > now);
                let just_before = Timestamp::from_micros(transition.as_micros() - 1);
                prop_assert_eq!(sale.state_at(just_before), sale.state_at(now));
                prop_assert!(sale.state_at(transition) > sale.state_at(now));
            }
        }
    }
}

fn stages() -> impl Strategy<Value = SaleStage> {
    let ends = [EndReason::SoldOut, EndReason::TimeExpired, EndReason::EndedByOperator].map(SaleState::Ended);
    let states = [SaleState::Upcoming, SaleState::Active].into_iter().chain(ends).collect::<Vec<_>>();
    (prop::sample::select(states), 0_u32..30).prop_map(|(state, stock)| SaleStage { state, stock })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// Whatever servers publish, in whatever order: the stock never goes up once a sale has begun, and its end is the last event.
    #[test]
    fn events_lead_only_forward_and_to_what_is_true(targets in prop::collection::vec((stages(), 0_u32..40), 1..20)) {
        let initial = Stock::new(30).unwrap();
        let mut stage = SaleStage { state: SaleState::Upcoming, stock: 30 };
        for (to, stocks_max) in targets {
            let changes = stage.changes_to(&to, initial, stocks_max);
            prop_assert_eq!(changes.is_empty(), !stage.is_before(&to));
            let stocks = changes.iter().filter(|(change, _)| matches!(change, SaleChange::Stock(_))).count();
            prop_assert!(stocks <= stocks_max.max(1) as usize);
            for (change, after) in changes {
                match change {
                    SaleChange::Stock(stock) => {
                        prop_assert_eq!(stage.state, SaleState::Active);
                        prop_assert!(stock < stage.stock, "{} after {}", stock, stage.stock);
                        prop_assert_eq!(after, SaleStage { stock, ..stage });
                    }
                    SaleChange::State(state) => {
                        prop_assert!(state > stage.state);
                        prop_assert_eq!(after.state, state);
                    }
                }
                stage = after;
            }
            prop_assert!(!stage.is_before(&to), "nothing is left to tell");
        }
    }
}

#[test]
fn each_unit_has_an_event_if_there_are_few() {
    let initial = Stock::new(10).unwrap();
    let changes = |from: SaleStage, to: SaleStage, stocks_max| {
        let changes = from.changes_to(&to, initial, stocks_max);
        changes.into_iter().map(|(change, _)| change).collect::<Vec<_>>()
    };
    let [ten, seven] = [10, 7].map(|stock| SaleStage { state: SaleState::Active, stock });
    assert_eq!(changes(ten, seven, 3), [9, 8, 7].map(SaleChange::Stock));
    assert_eq!(changes(ten, seven, 2), [SaleChange::Stock(7)]);
    let sold_out = SaleState::Ended(EndReason::SoldOut);
    let upcoming = SaleStage { state: SaleState::Upcoming, stock: 4 };
    let end = SaleStage { state: sold_out, stock: 9 };
    let expected = [SaleChange::State(SaleState::Active), SaleChange::Stock(9), SaleChange::State(sold_out)];
    assert_eq!(changes(upcoming, end, 5), expected);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Buy(u8),
    End,
    Extend(i64),
}

fn steps() -> impl Strategy<Value = Vec<(Step, i64)>> {
    let step = prop_oneof![
        8 => (0_u8..20).prop_map(Step::Buy),
        1 => Just(Step::End),
        2 => (-20_i64..200).prop_map(Step::Extend),
    ];
    prop::collection::vec((step, -20_i64..220), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    /// Operators end and extend a sale while buyers come. The model knows when the sale ends, and what the clock showed last.
    #[test]
    fn an_operator_ends_an_active_sale_for_ever_and_extends_one_that_has_not_ended(stock in 1_u32..12, steps in steps()) {
        let mut sale = sale(stock);
        let (mut end, mut has_begun, mut has_ended) = (DURATION, false, None);
        let mut bought = BTreeSet::new();
        for (step, offset) in steps {
            has_begun |= offset >= 0;
            if has_ended.is_none() && offset >= end {
                has_ended = Some(EndReason::TimeExpired);
            }
            let is_active = has_begun && has_ended.is_none();
            match step {
                Step::Buy(buyer) => {
                    let is_new = !bought.contains(&buyer);
                    let outcome = sale.sell(!is_new, at(offset));
                    prop_assert_eq!(outcome.is_ok(), is_new && is_active);
                    if outcome.is_ok() {
                        bought.insert(buyer);
                        if bought.len() == stock as usize {
                            has_ended = Some(EndReason::SoldOut);
                        }
                    }
                }
                Step::End => {
                    prop_assert_eq!(sale.end(at(offset)), is_active);
                    if is_active {
                        has_ended = Some(EndReason::EndedByOperator);
                    }
                }
                Step::Extend(later) => {
                    let expected = match has_ended {
                        Some(_) => Err(ChangeError::NotModifiable),
                        None if later <= end => Err(ChangeError::Terms(TermsError::NotExtended)),
                        None => {
                            end = later;
                            Ok(())
                        }
                    };
                    prop_assert_eq!(sale.extend(at(later), at(offset)), expected);
                }
            }
            prop_assert_eq!(sale.state.end_reason(), has_ended);
            prop_assert_eq!(sale.terms.end, at(end));
            prop_assert_eq!(sale.sold as usize, bought.len());
            let is_active = has_begun && has_ended.is_none();
            prop_assert_eq!(sale.is_unused(at(offset)), bought.is_empty() && !is_active);
        }
    }
}

#[test]
fn start_and_end_belong_to_the_state_they_begin() {
    let sale = sale(1);
    assert_eq!(sale.state_at(at(-1)), SaleState::Upcoming);
    assert_eq!(sale.state_at(at(0)), SaleState::Active);
    assert_eq!(sale.state_at(at(DURATION - 1)), SaleState::Active);
    assert_eq!(sale.state_at(at(DURATION)), SaleState::Ended(EndReason::TimeExpired));
}

#[test]
fn the_last_unit_ends_a_sale_at_once_and_later_buyers_get_sold_out() {
    let mut sale = sale(1);
    assert_eq!(sale.sell(false, at(1)).map(|receipt| receipt.number), Ok(1));
    assert_eq!(sale.state, SaleState::Ended(EndReason::SoldOut));
    assert_eq!(sale.sell(false, at(1)), Err(PurchaseRefusal::SoldOut));
    assert_eq!(
        sale.sell(true, at(DURATION + 1)),
        Err(PurchaseRefusal::AlreadyPurchased),
        "before the state is checked"
    );
    assert_eq!(
        sale.sell(false, at(DURATION + 1)),
        Err(PurchaseRefusal::SoldOut),
        "why it ended does not change"
    );
}

#[test]
fn terms_change_only_before_the_start() {
    let mut sale = sale(5);
    let more = TermsChange { initial_stock: Some(9), ..TermsChange::default() };
    assert_eq!(sale.change(&more, at(-5)), Ok(()));
    assert_eq!(sale.stock(), 9);
    let past = TermsChange { start: Some(at(-6)), ..TermsChange::default() };
    assert_eq!(sale.change(&past, at(-5)), Err(ChangeError::Terms(TermsError::StartTime)));
    let turned = TermsChange { end: Some(at(-1)), ..TermsChange::default() };
    assert_eq!(sale.change(&turned, at(-5)), Err(ChangeError::Terms(TermsError::EndTime)));
    assert_eq!(sale.terms.initial_stock.get(), 9, "a refused change changes nothing");
    assert_eq!(sale.change(&more, at(0)), Err(ChangeError::NotModifiable));
    assert_eq!(sale.change(&TermsChange::default(), at(DURATION)), Err(ChangeError::NotModifiable));
}

#[test]
fn states_are_parsed_as_they_are_written() {
    let ends = [EndReason::SoldOut, EndReason::TimeExpired, EndReason::EndedByOperator].map(SaleState::Ended);
    for state in [SaleState::Upcoming, SaleState::Active].into_iter().chain(ends) {
        let reason = state.end_reason().map(EndReason::as_str);
        assert_eq!(SaleState::parse(state.as_str(), reason), Some(state));
    }
    for (state, reason) in [("ENDED", None), ("ACTIVE", Some("SOLD_OUT")), ("active", None), ("", None)] {
        assert_eq!(SaleState::parse(state, reason), None, "{state}");
    }
}
