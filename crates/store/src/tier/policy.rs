//! Policies: limits that callers name, and how a table keeps them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use weir_core::PolicyName;
use weir_core::tier::{FixedWindow, Limit, LimitError, ScopedRule, SlidingWindow, TokenBucket};

/// The most policies there can be: every server keeps all of them in memory.
pub const POLICIES_MAX: usize = 10_000;

/// What becomes of checks while whoever counts for all servers cannot be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOutage {
    /// All are allowed, and nothing is counted.
    Open,
    /// All are denied.
    Closed,
    /// Each server counts for itself.
    #[default]
    Local,
}

impl OnOutage {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Open, Self::Closed, Self::Local];

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
        }
    }

    /// The choice of that name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.as_str() == text)
    }
}

/// Which descriptors of a proxy a policy is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// The domain they come under.
    pub domain: String,
    /// The entries they have, no more and no fewer: a value, or `*` for any.
    pub entries: BTreeMap<String, String>,
}

impl Match {
    /// The key that a descriptor spends under, if it is one of these: the values of its entries, in order of their names,
    /// joined with `|`. Where there are several, a `|` or `\` within one has a `\` before it: values are callers' own, and none
    /// may be read as two.
    #[must_use]
    pub fn key(&self, domain: &str, entries: &[(&str, &str)]) -> Option<String> {
        if self.domain != domain || self.entries.len() != entries.len() {
            return None;
        }
        let mut values = Vec::with_capacity(entries.len());
        for (name, wanted) in &self.entries {
            let mut found = entries.iter().filter(|(given, _)| given == name);
            let (Some((_, value)), None) = (found.next(), found.next()) else { return None };
            if wanted != "*" && wanted != value {
                return None;
            }
            values.push(*value);
        }
        match &values[..] {
            [value] => Some((*value).to_owned()),
            several => {
                let escaped = several.iter().map(|value| value.replace('\\', "\\\\").replace('|', "\\|"));
                Some(escaped.collect::<Vec<_>>().join("|"))
            }
        }
    }

    /// The entries as a table keeps them: a line each, name and value apart by a tab. Neither has control characters.
    #[must_use]
    pub fn entries_text(&self) -> String {
        let lines = self.entries.iter().map(|(name, value)| format!("{name}\t{value}"));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The entries from their text.
    #[must_use]
    pub fn parse(domain: &str, text: &str) -> Self {
        let entries = text.lines().filter_map(|line| line.split_once('\t'));
        let entries = entries.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { domain: domain.to_owned(), entries }
    }
}

/// What a policy says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    /// How much its keys may spend.
    pub limit: Limit,
    /// Whether it only observes and never denies.
    pub shadow: bool,
    /// What becomes of checks in an outage.
    pub on_outage: OnOutage,
    /// Which descriptors of proxies it is about.
    pub matches: Option<Match>,
}

impl PolicySpec {
    /// A limit with nothing special about it.
    #[must_use]
    pub const fn plain(limit: Limit) -> Self {
        Self { limit, shadow: false, on_outage: OnOutage::Local, matches: None }
    }
}

/// A policy as a store has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Its name.
    pub name: PolicyName,
    /// What it says.
    pub spec: PolicySpec,
    /// Its limit under its number: one that is never used again.
    pub scoped: Arc<ScopedRule<Limit>>,
}

impl Policy {
    /// Puts it together.
    #[must_use]
    pub fn new(name: PolicyName, scope: u32, spec: PolicySpec) -> Self {
        let scoped = Arc::new(ScopedRule { scope, rule: spec.limit });
        Self { name, spec, scoped }
    }

    /// Its number.
    #[must_use]
    pub fn scope(&self) -> u32 {
        self.scoped.scope
    }
}

/// A row that no Weir has written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a policy of the kind {0:?} that cannot be")]
pub struct UnreadablePolicy(String);

impl From<LimitError> for UnreadablePolicy {
    fn from(problem: LimitError) -> Self {
        Self(problem.to_string())
    }
}

impl PolicySpec {
    /// The limit as tables keep it: kind, amount, refill (0 but for buckets), milliseconds.
    #[must_use]
    pub fn limit_columns(&self) -> (&'static str, u32, u32, i64) {
        let ms = |span: Duration| i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        match &self.limit {
            Limit::TokenBucket(bucket) => {
                ("token_bucket", bucket.capacity(), bucket.refill(), ms(bucket.period()))
            }
            Limit::FixedWindow(window) => ("fixed_window", window.limit(), 0, ms(window.window())),
            Limit::SlidingWindow(window) => ("sliding_window", window.limit(), 0, ms(window.window())),
        }
    }

    /// The limit from its numbers.
    /// Fails when they are none that [`PolicySpec::limit_columns`] gives.
    pub fn limit_from_columns(
        kind: &str,
        amount: u32,
        refill: u32,
        ms: i64,
    ) -> Result<Limit, UnreadablePolicy> {
        let span = Duration::from_millis(u64::try_from(ms).unwrap_or(0));
        Ok(match kind {
            "token_bucket" => Limit::TokenBucket(TokenBucket::new(amount, refill, span)?),
            "fixed_window" => Limit::FixedWindow(FixedWindow::new(amount, span)?),
            "sliding_window" => Limit::SlidingWindow(SlidingWindow::new(amount, span)?),
            other => return Err(UnreadablePolicy(other.to_owned())),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn wanted(entries: &[(&str, &str)]) -> Match {
        let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Match { domain: "edge".to_owned(), entries: entries.collect() }
    }

    #[test]
    fn a_descriptor_matches_when_it_has_the_same_entries_in_any_order() {
        let both = wanted(&[("path", "/login"), ("remote_address", "*")]);
        let given = [("remote_address", "10.0.0.1"), ("path", "/login")];
        assert_eq!(both.key("edge", &given).as_deref(), Some("/login|10.0.0.1"));
        assert_eq!(both.key("other", &given), None);
        assert_eq!(both.key("edge", &[("remote_address", "10.0.0.1"), ("path", "/")]), None);
        assert_eq!(both.key("edge", &given[..1]), None, "one is missing");
        assert_eq!(both.key("edge", &[given[0], given[0]]), None, "one is there twice, another not at all");
        let one = wanted(&[("remote_address", "*")]);
        assert_eq!(one.key("edge", &given), None, "there is one more");
        assert_eq!(one.key("edge", &given[..1]).as_deref(), Some("10.0.0.1"));
    }

    #[test]
    fn no_two_descriptors_of_a_policy_spend_under_one_key() {
        let two = wanted(&[("a", "*"), ("b", "*")]);
        let values = ["x", "x|y", "|", "x\\", "\\|x", "", "y"];
        let pairs = values.iter().flat_map(|a| values.iter().map(move |b| [("a", *a), ("b", *b)]));
        let keys: BTreeSet<_> = pairs.map(|pair| two.key("edge", &pair).unwrap()).collect();
        assert_eq!(keys.len(), values.len() * values.len());
        let one = wanted(&[("a", "*")]);
        assert_eq!(one.key("edge", &[("a", "x|y\\")]).as_deref(), Some("x|y\\"), "a single one is itself");
    }

    #[test]
    fn entries_read_back_as_they_were_written() {
        for entries in [&[][..], &[("a", "*")], &[("a", "x=y"), ("b", "")]] {
            let matches = wanted(entries);
            assert_eq!(Match::parse("edge", &matches.entries_text()), matches);
        }
    }

    #[test]
    fn limits_read_back_as_they_were_written() {
        let minute = Duration::from_secs(60);
        for limit in [
            Limit::TokenBucket(TokenBucket::new(8, 5, minute).unwrap()),
            Limit::FixedWindow(FixedWindow::new(7, minute).unwrap()),
            Limit::SlidingWindow(SlidingWindow::new(7, minute).unwrap()),
        ] {
            let (kind, amount, refill, ms) = PolicySpec::plain(limit).limit_columns();
            assert_eq!(PolicySpec::limit_from_columns(kind, amount, refill, ms), Ok(limit));
        }
        assert!(PolicySpec::limit_from_columns("leaky", 1, 1, 1).is_err());
        assert!(PolicySpec::limit_from_columns("fixed_window", 0, 0, 1).is_err());
        assert!(PolicySpec::limit_from_columns("fixed_window", 1, 0, -1).is_err());
    }
}
