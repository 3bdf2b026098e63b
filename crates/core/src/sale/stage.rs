//! What listeners know of a sale, and the events that lead from there to what is true now.

use super::{SaleState, Stock};

/// The state and the stock of a sale, as its events have told them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaleStage {
    pub state: SaleState,
    pub stock: u32,
}

/// One event of a sale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaleChange {
    /// So many units are left.
    Stock(u32),
    State(SaleState),
}

impl SaleStage {
    /// Returns whether events lead from here to `to`. Nothing leads back, and nothing leads on from the end.
    #[must_use]
    pub fn is_before(&self, to: &Self) -> bool {
        match (self.state, to.state) {
            (SaleState::Ended(_), _) | (_, SaleState::Upcoming) => false,
            (SaleState::Upcoming, _) | (SaleState::Active, SaleState::Ended(_)) => true,
            (SaleState::Active, SaleState::Active) => to.stock < self.stock,
        }
    }

    /// Returns the events that lead from here to `to`, in order: the start, the stocks, the end; each with the stage after it.
    /// Each unit has an event if there are at most `stocks_max`, otherwise the last one. A sale begins with `initial_stock`,
    /// whatever it was before.
    #[must_use]
    pub fn changes_to(&self, to: &Self, initial_stock: Stock, stocks_max: u32) -> Vec<(SaleChange, Self)> {
        let (mut changes, mut stage) = (Vec::new(), *self);
        if !self.is_before(to) {
            return changes;
        }
        if stage.state == SaleState::Upcoming {
            stage = Self { state: SaleState::Active, stock: initial_stock.get() };
            changes.push((SaleChange::State(stage.state), stage));
        }
        if to.stock < stage.stock {
            let gap = stage.stock.saturating_sub(to.stock);
            let first = if gap <= stocks_max { stage.stock.saturating_sub(1) } else { to.stock };
            for stock in (to.stock..=first).rev() {
                stage.stock = stock;
                changes.push((SaleChange::Stock(stock), stage));
            }
        }
        if let SaleState::Ended(_) = to.state {
            stage.state = to.state;
            changes.push((SaleChange::State(to.state), stage));
        }
        changes
    }
}
