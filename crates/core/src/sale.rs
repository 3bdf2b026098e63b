//! Sale: units of stock, one per buyer, between two times.
//!
//! A sale is UPCOMING until its start, ACTIVE until its end or its last unit, and then ENDED for ever: whatever the clock
//! does later, a state is never left backwards. A buyer who has a unit is told so whatever the state; nobody gets a second.

mod number;
mod terms;

pub use number::PurchaseNo;
pub use terms::{Sku, SkuError, Stock, Terms, TermsChange, TermsError};

use crate::Timestamp;

/// Why a sale is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndReason {
    /// Every unit has a buyer.
    SoldOut,
    /// Its time is over.
    TimeExpired,
}

impl EndReason {
    /// The reason's name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SoldOut => "SOLD_OUT",
            Self::TimeExpired => "TIME_EXPIRED",
        }
    }
}

/// Where a sale is on its way. Later states are greater; why it ended does not change any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SaleState {
    /// Nobody can buy yet.
    #[default]
    Upcoming,
    /// Whoever comes while there is stock gets a unit.
    Active,
    /// Nobody can buy any more.
    Ended(EndReason),
}

impl SaleState {
    /// The state's name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Upcoming => "UPCOMING",
            Self::Active => "ACTIVE",
            Self::Ended(_) => "ENDED",
        }
    }

    /// Why it is over, once it is.
    #[must_use]
    pub const fn end_reason(self) -> Option<EndReason> {
        match self {
            Self::Ended(reason) => Some(reason),
            Self::Upcoming | Self::Active => None,
        }
    }

    /// The state a table holds; None for texts that no version wrote.
    #[must_use]
    pub fn parse(state: &str, reason: Option<&str>) -> Option<Self> {
        match (state, reason) {
            ("UPCOMING", None) => Some(Self::Upcoming),
            ("ACTIVE", None) => Some(Self::Active),
            ("ENDED", Some("SOLD_OUT")) => Some(Self::Ended(EndReason::SoldOut)),
            ("ENDED", Some("TIME_EXPIRED")) => Some(Self::Ended(EndReason::TimeExpired)),
            _ => None,
        }
    }
}

/// A sale as it stands: what it offers, what is sold, and the state it was last seen in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sale {
    /// What it offers, and when.
    pub terms: Terms,
    /// Units that have a buyer.
    pub sold: u32,
    /// The state it was last seen in. Time may have passed since: ask [`Sale::state_at`].
    pub state: SaleState,
}

/// Why a buyer gets no unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurchaseRefusal {
    /// The buyer has one already.
    AlreadyPurchased,
    /// All units have buyers.
    SoldOut,
    /// The sale has not begun, or its time is over.
    NotActive,
}

/// A unit that has found its buyer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PurchaseReceipt {
    /// Counts the sale's purchases, from 1.
    pub number: u32,
    /// When it was bought.
    pub at: Timestamp,
}

impl PurchaseReceipt {
    /// The name the buyer knows it by.
    #[must_use]
    pub const fn purchase_no(self) -> PurchaseNo {
        PurchaseNo { number: self.number, at: self.at }
    }
}

impl Sale {
    /// A sale that nobody has bought from.
    #[must_use]
    pub const fn new(terms: Terms) -> Self {
        Self { terms, sold: 0, state: SaleState::Upcoming }
    }

    /// Units without a buyer.
    #[must_use]
    pub const fn stock(&self) -> u32 {
        self.terms.initial_stock.get().saturating_sub(self.sold)
    }

    /// The state at a time: the one it was last seen in, or a later one that is due. The last unit ends it at once.
    #[must_use]
    pub fn state_at(&self, now: Timestamp) -> SaleState {
        if let SaleState::Ended(_) = self.state {
            return self.state;
        }
        let due = if self.stock() == 0 {
            SaleState::Ended(EndReason::SoldOut)
        } else if now >= self.terms.end {
            SaleState::Ended(EndReason::TimeExpired)
        } else if now >= self.terms.start {
            SaleState::Active
        } else {
            SaleState::Upcoming
        };
        self.state.max(due)
    }

    /// When time alone changes the state next; None once it is over.
    #[must_use]
    pub fn next_transition(&self, now: Timestamp) -> Option<Timestamp> {
        match self.state_at(now) {
            SaleState::Upcoming => Some(self.terms.start),
            SaleState::Active => Some(self.terms.end),
            SaleState::Ended(_) => None,
        }
    }

    /// Takes note of the time. True when the state has changed.
    pub fn advance(&mut self, now: Timestamp) -> bool {
        let after = self.state_at(now);
        std::mem::replace(&mut self.state, after) != after
    }

    /// Sells one unit to a buyer, or says why not. `has_one` is whether the buyer has bought from this sale before: that
    /// is the answer then, whatever the state, so that a buyer who asks again after a lost answer learns the truth.
    /// The refusal; nothing has changed then but, with time, the state.
    pub fn sell(&mut self, has_one: bool, now: Timestamp) -> Result<PurchaseReceipt, PurchaseRefusal> {
        self.advance(now);
        if has_one {
            return Err(PurchaseRefusal::AlreadyPurchased);
        }
        match self.state {
            SaleState::Ended(EndReason::SoldOut) => return Err(PurchaseRefusal::SoldOut),
            SaleState::Upcoming | SaleState::Ended(EndReason::TimeExpired) => {
                return Err(PurchaseRefusal::NotActive);
            }
            SaleState::Active => {}
        }
        // An active sale has stock, or the turn above would have ended it.
        self.sold = self.sold.saturating_add(1);
        self.advance(now);
        Ok(PurchaseReceipt { number: self.sold, at: now })
    }

    /// Changes what the sale offers, while nobody can have bought.
    /// Why it stays as it was.
    pub fn change(&mut self, change: &TermsChange, now: Timestamp) -> Result<(), ChangeError> {
        self.advance(now);
        if self.state != SaleState::Upcoming {
            return Err(ChangeError::NotModifiable);
        }
        let terms = change.apply(&self.terms)?;
        terms.check_starts_after(now)?;
        self.terms = terms;
        Ok(())
    }
}

/// Why a sale's terms stay as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It has begun, or is over.
    #[error("the sale is active or ended")]
    NotModifiable,
    /// The new terms are none.
    #[error(transparent)]
    Terms(#[from] TermsError),
}
