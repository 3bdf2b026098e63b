//! The status that a load expects. Other statuses are noted in the report.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

/// The expected status. As text `2xx`, or a status such as `429`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Expect {
    /// Any 2xx.
    #[default]
    Success,
    /// Exactly this one, such as 429 for a load of refusals.
    Status(u16),
}

impl Expect {
    #[must_use]
    pub fn is_met_by(self, status: u16) -> bool {
        match self {
            Self::Success => (200..300).contains(&status),
            Self::Status(expected) => status == expected,
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Success => f.write_str("2xx"),
            Self::Status(status) => status.fmt(f),
        }
    }
}

impl FromStr for Expect {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "2xx" {
            return Ok(Self::Success);
        }
        let status = text.parse().context("use 2xx or a status such as 429")?;
        ensure!((200..600).contains(&status), "a status of an answer is between 200 and 599");
        Ok(Self::Status(status))
    }
}

impl From<Expect> for String {
    fn from(expect: Expect) -> Self {
        expect.to_string()
    }
}

impl TryFrom<String> for Expect {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_2xx_is_a_success_and_a_status_is_only_itself() {
        let met = |expect: Expect, statuses: [u16; 5]| statuses.map(|status| expect.is_met_by(status));
        let statuses = [199, 200, 299, 300, 429];
        assert_eq!(met(Expect::Success, statuses), [false, true, true, false, false]);
        assert_eq!(met(Expect::Status(429), statuses), [false, false, false, false, true]);
        assert_eq!(met(Expect::Status(200), statuses), [false, true, false, false, false]);
    }

    #[test]
    fn its_text_reads_back() {
        for expect in [Expect::Success, Expect::Status(200), Expect::Status(429)] {
            assert_eq!(expect.to_string().parse::<Expect>().unwrap(), expect);
        }
        for text in ["", "2XX", "4xx", "199", "600", "-1", "429 "] {
            assert!(text.parse::<Expect>().is_err(), "{text}");
        }
    }
}
