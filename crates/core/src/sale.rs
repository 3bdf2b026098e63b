//! Sale: units of stock, one per buyer, between a start and an end time.
//!
//! A sale is UPCOMING until its start, ACTIVE until its end or its last unit, then ENDED for ever. It never returns to
//! an earlier state, whatever the clock does. A buyer who owns a unit gets that answer in every state; nobody gets a
//! second unit.

pub mod anomaly;
mod number;
mod stage;
mod terms;

pub use number::PurchaseNo;
pub use stage::{SaleChange, SaleStage};
pub use terms::{Sku, SkuError, Stock, Terms, TermsChange, TermsError};

use crate::Timestamp;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndReason {
    SoldOut,
    TimeExpired,
    /// An operator ended the sale before its time.
    EndedByOperator,
}

impl EndReason {
    /// Returns the name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SoldOut => "SOLD_OUT",
            Self::TimeExpired => "TIME_EXPIRED",
            Self::EndedByOperator => "ENDED_BY_OPERATOR",
        }
    }

    /// Returns the reason that versions without [`EndReason::EndedByOperator`] know. Stores keep it where these versions read,
    /// and what an operator did beside it.
    #[must_use]
    pub const fn as_early_str(self) -> &'static str {
        match self {
            Self::EndedByOperator => Self::TimeExpired.as_str(),
            other => other.as_str(),
        }
    }
}

/// The state of a sale. Later states are greater. The reason for the end never changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SaleState {
    #[default]
    Upcoming,
    Active,
    Ended(EndReason),
}

impl SaleState {
    /// Returns the name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Upcoming => "UPCOMING",
            Self::Active => "ACTIVE",
            Self::Ended(_) => "ENDED",
        }
    }

    #[must_use]
    pub const fn end_reason(self) -> Option<EndReason> {
        match self {
            Self::Ended(reason) => Some(reason),
            Self::Upcoming | Self::Active => None,
        }
    }

    /// Parses the columns of a table. Returns `None` for values that no version has written.
    #[must_use]
    pub fn parse(state: &str, reason: Option<&str>) -> Option<Self> {
        match (state, reason) {
            ("UPCOMING", None) => Some(Self::Upcoming),
            ("ACTIVE", None) => Some(Self::Active),
            ("ENDED", Some("SOLD_OUT")) => Some(Self::Ended(EndReason::SoldOut)),
            ("ENDED", Some("TIME_EXPIRED")) => Some(Self::Ended(EndReason::TimeExpired)),
            ("ENDED", Some("ENDED_BY_OPERATOR")) => Some(Self::Ended(EndReason::EndedByOperator)),
            _ => None,
        }
    }
}

/// A sale: what it offers, what is sold, and the last recorded state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sale {
    pub terms: Terms,
    pub sold: u32,
    /// The last recorded state. The state may have changed since: see [`Sale::state_at`].
    pub state: SaleState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurchaseRefusal {
    AlreadyPurchased,
    SoldOut,
    /// The sale has not started, or its time is over.
    NotActive,
}

/// A completed purchase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PurchaseReceipt {
    /// The number of the purchase within the sale, from 1.
    pub number: u32,
    pub at: Timestamp,
}

impl PurchaseReceipt {
    #[must_use]
    pub const fn purchase_no(self) -> PurchaseNo {
        PurchaseNo { number: self.number, at: self.at }
    }
}

impl Sale {
    #[must_use]
    pub const fn new(terms: Terms) -> Self {
        Self { terms, sold: 0, state: SaleState::Upcoming }
    }

    /// Returns the units left.
    #[must_use]
    pub const fn stock(&self) -> u32 {
        self.terms.initial_stock.get().saturating_sub(self.sold)
    }

    /// Returns what listeners should know.
    #[must_use]
    pub const fn stage(&self) -> SaleStage {
        SaleStage { state: self.state, stock: self.stock() }
    }

    /// Returns the state at `now`: the recorded one, or a later one that is due. Selling the last unit ends a sale at
    /// once.
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

    /// Returns when the state changes next by time alone, or `None` once the sale has ended.
    #[must_use]
    pub fn next_transition(&self, now: Timestamp) -> Option<Timestamp> {
        match self.state_at(now) {
            SaleState::Upcoming => Some(self.terms.start),
            SaleState::Active => Some(self.terms.end),
            SaleState::Ended(_) => None,
        }
    }

    /// Records the state at `now` and returns whether it has changed.
    pub fn advance(&mut self, now: Timestamp) -> bool {
        let after = self.state_at(now);
        std::mem::replace(&mut self.state, after) != after
    }

    /// Sells one unit, or refuses. `has_bought` says whether the buyer has bought from this sale before; that is then
    /// the answer in every state, so that a buyer who retries after a lost response learns of the purchase. A refusal
    /// changes at most the state, as time passes.
    pub fn sell(&mut self, has_bought: bool, now: Timestamp) -> Result<PurchaseReceipt, PurchaseRefusal> {
        self.advance(now);
        if has_bought {
            return Err(PurchaseRefusal::AlreadyPurchased);
        }
        match self.state {
            SaleState::Ended(EndReason::SoldOut) => return Err(PurchaseRefusal::SoldOut),
            SaleState::Upcoming | SaleState::Ended(EndReason::TimeExpired | EndReason::EndedByOperator) => {
                return Err(PurchaseRefusal::NotActive);
            }
            SaleState::Active => {}
        }
        // An active sale has stock: otherwise `advance` would have ended it.
        self.sold = self.sold.saturating_add(1);
        self.advance(now);
        Ok(PurchaseReceipt { number: self.sold, at: now })
    }

    /// Changes the terms of a sale that has not started.
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

    /// Ends an active sale at once, for ever. Returns false if it is not active.
    pub fn end(&mut self, now: Timestamp) -> bool {
        self.advance(now);
        let is_active = self.state == SaleState::Active;
        if is_active {
            self.state = SaleState::Ended(EndReason::EndedByOperator);
        }
        is_active
    }

    /// Moves the end of a sale that has not ended to a later time.
    pub fn extend(&mut self, end: Timestamp, now: Timestamp) -> Result<(), ChangeError> {
        self.advance(now);
        if let SaleState::Ended(_) = self.state {
            return Err(ChangeError::NotModifiable);
        }
        if end <= self.terms.end {
            return Err(TermsError::NotExtended.into());
        }
        self.terms.end = end;
        Ok(())
    }

    /// Returns whether deleting the product at `now` takes nothing from anybody: nothing is for sale and nothing is sold.
    #[must_use]
    pub fn is_unused(&self, now: Timestamp) -> bool {
        self.sold == 0 && self.state_at(now) != SaleState::Active
    }
}

/// Why the terms of a sale cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The sale has begun or, for an extension, ended.
    #[error("the sale is active or ended")]
    NotModifiable,
    #[error(transparent)]
    Terms(#[from] TermsError),
}
