//! The day on which the months of a subscription begin.

use std::fmt;
use std::str::FromStr;

/// A calendar day: monthly meters turn on its day of every month, or on the month's last day if that comes earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Anchor {
    year: u16,
    month: u16,
    day: u16,
}

/// A text that is not a calendar day. The message completes the sentence "anchor …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a calendar day in the years 1 to 9999, such as 2026-01-31")]
pub struct UnknownDay;

impl Anchor {
    /// Returns the day of the month, from 1 to 31.
    #[must_use]
    pub const fn day(self) -> u16 {
        self.day
    }
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl FromStr for Anchor {
    type Err = UnknownDay;

    fn from_str(text: &str) -> Result<Self, UnknownDay> {
        let is_written_so = text.len() == 10
            && text.bytes().enumerate().all(|(at, byte)| match at {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        if !is_written_so {
            return Err(UnknownDay);
        }
        // All bytes are ASCII, so every slice is a text of digits.
        let number = |slice: &str| slice.parse::<u16>().unwrap_or(0);
        let (year, month, day) = (number(&text[..4]), number(&text[5..7]), number(&text[8..]));
        let is_valid =
            year >= 1 && (1..=12).contains(&month) && (1..=days_in_month(year, month)).contains(&day);
        if is_valid { Ok(Self { year, month, day }) } else { Err(UnknownDay) }
    }
}

const fn days_in_month(year: u16, month: u16) -> u16 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calendar_day_reads_back_as_it_was_written() {
        for text in ["2026-01-31", "2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2026-04-30"] {
            assert_eq!(text.parse::<Anchor>().map(|anchor| anchor.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("2026-01-31".parse::<Anchor>().map(Anchor::day), Ok(31));
    }

    #[test]
    fn what_is_no_calendar_day_is_refused() {
        for text in [
            "",
            "2026-1-31",
            "2026-01-32",
            "2026-00-10",
            "2026-13-01",
            "2026-04-31",
            "2025-02-29",
            "1900-02-29",
            "0000-01-01",
            "2026/01/31",
            "2026-01-31Z",
            "2026-01-31T00:00:00Z",
            "+026-01-31",
            "２026-01-3",
            "20260131",
        ] {
            assert_eq!(text.parse::<Anchor>(), Err(UnknownDay), "{text}");
        }
    }
}
