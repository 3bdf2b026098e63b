//! The log of the events of sales, which servers on one Redis share.

use std::fmt;
use std::str::FromStr;

use weir_core::sale::{SaleChange, SaleStage, Sku, Stock};

use super::ProductId;

/// The id of an event. Later events have greater ids. `epoch` is greater in every new log; in one log numbers count from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId {
    pub epoch: u64,
    pub number: u64,
}

impl EventId {
    #[must_use]
    pub const fn next(self) -> Self {
        Self { epoch: self.epoch, number: self.number.saturating_add(1) }
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch, self.number)
    }
}

/// The text is no [`EventId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be the id of an event")]
pub struct EventIdError;

impl FromStr for EventId {
    type Err = EventIdError;

    fn from_str(text: &str) -> Result<Self, EventIdError> {
        let (epoch, number) = text.split_once('-').ok_or(EventIdError)?;
        let parse = |text: &str| text.parse().map_err(|_invalid| EventIdError);
        Ok(Self { epoch: parse(epoch)?, number: parse(number)? })
    }
}

/// An event in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedEvent {
    pub id: EventId,
    pub sku: Sku,
    pub product: ProductId,
    pub change: SaleChange,
    /// State and stock after it.
    pub stage: SaleStage,
}

/// What a server wants the events of a sale to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    pub sku: Sku,
    pub product: ProductId,
    /// What this server's listeners know. The log may be further.
    pub from: SaleStage,
    pub to: SaleStage,
    pub initial_stock: Stock,
    /// The most stocks that may be told one by one.
    pub stocks_max: u32,
}

/// A part of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventPage {
    /// The last event that is no longer in the log.
    pub dropped: EventId,
    /// The last event in the log.
    pub latest: EventId,
    /// The events up to the latest that the caller does not have.
    pub events: Vec<LoggedEvent>,
    /// For each publication, in order, how far the events up to the latest have led.
    pub stages: Vec<SaleStage>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_parsed_as_they_are_written() {
        let id = EventId { epoch: 1_771_149_600_000_000, number: 17 };
        assert_eq!(id.to_string(), "1771149600000000-17");
        assert_eq!("1771149600000000-17".parse(), Ok(id));
        assert!(id < id.next() && id.next() < EventId { epoch: id.epoch + 1, number: 0 });
        for bad in ["", "17", "-", "1-", "-1", "1-x", "1-2-3", "1--2", " 1-2"] {
            assert_eq!(bad.parse::<EventId>(), Err(EventIdError), "{bad}");
        }
    }
}
