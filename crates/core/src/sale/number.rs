//! Purchase numbers such as `PUR-20260215-0001`.

use std::fmt;

use crate::Timestamp;

const DAY_US: i64 = 86_400_000_000;

/// The public name of a purchase: its day in UTC, and its number within the sale, with four digits or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PurchaseNo {
    pub(super) number: u32,
    pub(super) at: Timestamp,
}

impl fmt::Display for PurchaseNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = date(self.at);
        write!(f, "PUR-{year:04}{month:02}{day:02}-{:04}", self.number)
    }
}

/// Converts to a day of the Gregorian calendar: Hinnant's `civil_from_days`. Years start in March, so that the leap
/// day is the last day of a year.
fn date(at: Timestamp) -> (i64, i64, i64) {
    let days = at.as_micros().div_euclid(DAY_US).saturating_add(719_468);
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let leaps = (day_of_era / 1_460).saturating_add(day_of_era / 146_096).saturating_sub(day_of_era / 36_524);
    let year_of_era = day_of_era.saturating_sub(leaps) / 365;
    let days_before =
        year_of_era.saturating_mul(365).saturating_add(year_of_era / 4).saturating_sub(year_of_era / 100);
    let day_of_year = day_of_era.saturating_sub(days_before);
    let month_from_march = day_of_year.saturating_mul(5).saturating_add(2) / 153;
    let first = month_from_march.saturating_mul(153).saturating_add(2) / 5;
    let day = day_of_year.saturating_sub(first).saturating_add(1);
    let month = if month_from_march < 10 {
        month_from_march.saturating_add(3)
    } else {
        month_from_march.saturating_sub(9)
    };
    let year = era.saturating_mul(400).saturating_add(year_of_era);
    (if month <= 2 { year.saturating_add(1) } else { year }, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no(seconds: i64, number: u32) -> String {
        PurchaseNo { number, at: Timestamp::from_seconds(seconds) }.to_string()
    }

    #[test]
    fn a_purchase_is_named_by_its_day_and_its_number() {
        assert_eq!(no(1_771_149_601, 1), "PUR-20260215-0001");
        assert_eq!(no(0, 42), "PUR-19700101-0042");
    }

    #[test]
    fn numbers_grow_past_four_digits() {
        assert_eq!(no(0, 9_999), "PUR-19700101-9999");
        assert_eq!(no(0, 10_000), "PUR-19700101-10000");
        assert_eq!(no(0, u32::MAX), "PUR-19700101-4294967295");
    }

    #[test]
    fn days_change_at_midnight_and_leap_years_have_one_more() {
        for (seconds, day) in [
            (951_782_399, "20000228"),
            (951_782_400, "20000229"),
            (951_868_800, "20000301"),
            (1_709_164_800, "20240229"),
            (1_740_787_199, "20250228"),
            (1_740_787_200, "20250301"),
            (1_767_225_599, "20251231"),
            (1_767_225_600, "20260101"),
            (4_107_542_400, "21000301"),
            (-1, "19691231"),
        ] {
            assert_eq!(no(seconds, 1), format!("PUR-{day}-0001"), "{seconds}");
        }
    }
}
