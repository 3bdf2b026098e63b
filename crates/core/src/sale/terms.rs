//! The terms of a sale: product, stock and times, validated once.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::Timestamp;

/// The key of a product and of its sale: 1 to 64 letters, digits and hyphens. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sku(Arc<str>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be 1 to {} letters, digits and hyphens", Sku::MAX_CHARS)]
pub struct SkuError;

impl Sku {
    pub const MAX_CHARS: usize = 64;

    /// Validates the text and copies it.
    pub fn parse(text: impl AsRef<str>) -> Result<Self, SkuError> {
        let text = text.as_ref();
        let is_valid = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if is_valid && (1..=Self::MAX_CHARS).contains(&text.len()) {
            Ok(Self(Arc::from(text)))
        } else {
            Err(SkuError)
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Sku {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The initial number of units of a sale: 1 to the maximum of a Postgres `INT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stock(NonZeroU32);

impl Stock {
    pub const MAX: u32 = i32::MAX.unsigned_abs();

    pub fn new(units: u32) -> Result<Self, TermsError> {
        let units = NonZeroU32::new(units).filter(|units| units.get() <= Self::MAX);
        units.map(Self).ok_or(TermsError::InitialStock)
    }

    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub product_name: Arc<str>,
    pub initial_stock: Stock,
    /// The time at which the sale starts.
    pub start: Timestamp,
    /// The time at which the sale ends; nothing is sold at this time or later.
    pub end: Timestamp,
}

/// The field that is invalid. The messages complete the sentence "productName …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TermsError {
    #[error("must have 1 to {} characters, none of them a control character", Terms::NAME_MAX_CHARS)]
    ProductName,
    #[error("must be an integer from 1 to {}", Stock::MAX)]
    InitialStock,
    #[error("must be in the future")]
    StartTime,
    #[error("must be after startTime")]
    EndTime,
    #[error("must be later than the present endTime")]
    NotExtended,
}

impl Terms {
    pub const NAME_MAX_CHARS: usize = 255;

    /// Validates the fields and trims the product name. Returns the first field that is invalid.
    pub fn new(
        product_name: &str,
        initial_stock: u32,
        start: Timestamp,
        end: Timestamp,
    ) -> Result<Self, TermsError> {
        let product_name = parse_product_name(product_name)?;
        let initial_stock = Stock::new(initial_stock)?;
        if end <= start {
            return Err(TermsError::EndTime);
        }
        Ok(Self { product_name, initial_stock, start, end })
    }

    /// Fails unless the sale starts after `now`.
    pub fn check_starts_after(&self, now: Timestamp) -> Result<(), TermsError> {
        if self.start > now { Ok(()) } else { Err(TermsError::StartTime) }
    }
}

fn parse_product_name(text: &str) -> Result<Arc<str>, TermsError> {
    let text = text.trim();
    let is_valid =
        (1..=Terms::NAME_MAX_CHARS).contains(&text.chars().count()) && !text.chars().any(char::is_control);
    if is_valid { Ok(Arc::from(text)) } else { Err(TermsError::ProductName) }
}

/// New values for the terms of a sale; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermsChange {
    pub product_name: Option<String>,
    pub initial_stock: Option<u32>,
    pub start: Option<Timestamp>,
    pub end: Option<Timestamp>,
}

impl TermsChange {
    /// Returns the terms after the change, or the first field that is invalid.
    pub fn apply(&self, terms: &Terms) -> Result<Terms, TermsError> {
        Terms::new(
            self.product_name.as_deref().unwrap_or(&terms.product_name),
            self.initial_stock.unwrap_or(terms.initial_stock.get()),
            self.start.unwrap_or(terms.start),
            self.end.unwrap_or(terms.end),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    #[test]
    fn a_sku_is_letters_digits_and_hyphens() {
        for good in ["A", "WIDGET-001", &"x".repeat(64)] {
            assert_eq!(Sku::parse(good).unwrap().as_str(), good);
        }
        for bad in ["", " A", "A_1", "a/b", "ü", "a\0", "{a}", &"x".repeat(65)] {
            assert_eq!(Sku::parse(bad), Err(SkuError), "{bad:?}");
        }
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        fn terms(name: &str, stock: u32, start: i64, end: i64) -> Result<(), TermsError> {
            Terms::new(name, stock, at(start), at(end)).map(|_| ())
        }
        assert_eq!(terms(" Widget ", 1, 1, 2), Ok(()));
        assert_eq!(terms(&"ü".repeat(255), Stock::MAX, 1, 2), Ok(()));
        for bad in ["", "  ", "a\nb", "a\0", &"x".repeat(256)] {
            assert_eq!(terms(bad, 1, 1, 2), Err(TermsError::ProductName), "{bad:?}");
        }
        for bad in [0, Stock::MAX + 1, u32::MAX] {
            assert_eq!(terms("x", bad, 1, 2), Err(TermsError::InitialStock));
        }
        assert_eq!(terms("x", 1, 2, 2), Err(TermsError::EndTime));
        assert_eq!(terms("x", 1, 3, 2), Err(TermsError::EndTime));
    }

    #[test]
    fn a_change_keeps_fields_that_are_not_given() {
        let terms = Terms::new("Widget", 5, at(10), at(20)).unwrap();
        assert_eq!(TermsChange::default().apply(&terms), Ok(terms.clone()));
        let change = TermsChange { initial_stock: Some(7), end: Some(at(30)), ..TermsChange::default() };
        assert_eq!(change.apply(&terms), Ok(Terms::new("Widget", 7, at(10), at(30)).unwrap()));
        let late = TermsChange { start: Some(at(20)), ..TermsChange::default() };
        assert_eq!(late.apply(&terms), Err(TermsError::EndTime));
    }
}
