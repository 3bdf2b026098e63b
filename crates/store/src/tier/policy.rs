//! Policies, which are named limits for keys that callers choose, and how tables store them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use weir_core::PolicyName;
use weir_core::tier::{FixedWindow, Limit, LimitError, ScopedRule, SlidingWindow, TokenBucket};

/// The maximum number of policies: every server holds all of them in memory.
pub const POLICIES_MAX: usize = 10_000;

/// How checks are answered while the shared counters cannot be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOutage {
    /// All are allowed and none is counted.
    Open,
    Closed,
    /// Each server counts for itself.
    #[default]
    Local,
}

impl OnOutage {
    pub const ALL: [Self; 3] = [Self::Open, Self::Closed, Self::Local];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local => "local",
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.as_str() == text)
    }
}

/// The rate limit descriptors of a proxy to which a policy applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    pub domain: String,
    /// Exactly the entries that a descriptor must have: a value, or `*` for any.
    pub entries: BTreeMap<String, String>,
}

impl Match {
    /// Returns the key of a descriptor, or `None` if it does not match: the values of its entries in order of their names,
    /// joined with `|`. If there are several, `|` and `\` within them are escaped with `\`, so that values chosen by callers
    /// cannot collide.
    #[must_use]
    pub fn key(&self, domain: &str, entries: &[(&str, &str)]) -> Option<String> {
        if self.domain != domain || self.entries.len() != entries.len() {
            return None;
        }
        let mut values = Vec::with_capacity(entries.len());
        for (name, value_or_any) in &self.entries {
            let mut found = entries.iter().filter(|(entry, _)| entry == name);
            let (Some((_, value)), None) = (found.next(), found.next()) else { return None };
            if value_or_any != "*" && value_or_any != value {
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

    /// The entries as a table stores them: one per line, name and value separated by a tab. Neither has control characters.
    #[must_use]
    pub fn entries_text(&self) -> String {
        let lines = self.entries.iter().map(|(name, value)| format!("{name}\t{value}"));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Reads what [`Match::entries_text`] has written.
    #[must_use]
    pub fn parse(domain: &str, text: &str) -> Self {
        let entries = text.lines().filter_map(|line| line.split_once('\t'));
        let entries = entries.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { domain: domain.to_owned(), entries }
    }
}

/// What an operator defines of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    pub limit: Limit,
    /// Whether the policy only observes and never denies.
    pub shadow: bool,
    pub on_outage: OnOutage,
    /// The proxy descriptors to which it applies.
    pub matches: Option<Match>,
}

impl PolicySpec {
    /// A limit with the default options.
    #[must_use]
    pub const fn plain(limit: Limit) -> Self {
        Self { limit, shadow: false, on_outage: OnOutage::Local, matches: None }
    }
}

/// A stored policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub name: PolicyName,
    pub spec: PolicySpec,
    /// The limit under the policy's scope, a number that is never reused.
    pub scoped: Arc<ScopedRule<Limit>>,
}

impl Policy {
    #[must_use]
    pub fn new(name: PolicyName, scope: u32, spec: PolicySpec) -> Self {
        let scoped = Arc::new(ScopedRule { scope, rule: spec.limit });
        Self { name, spec, scoped }
    }

    #[must_use]
    pub fn scope(&self) -> u32 {
        self.scoped.scope
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unreadable policy in the database: {0}")]
pub struct UnreadablePolicy(String);

impl From<LimitError> for UnreadablePolicy {
    fn from(problem: LimitError) -> Self {
        Self(problem.to_string())
    }
}

impl PolicySpec {
    /// The limit as table columns: kind, amount, refill (0 unless it is a bucket), milliseconds.
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

    /// Reads what [`PolicySpec::limit_columns`] has returned.
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

    fn matching(entries: &[(&str, &str)]) -> Match {
        let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Match { domain: "edge".to_owned(), entries: entries.collect() }
    }

    #[test]
    fn a_descriptor_matches_when_it_has_the_same_entries_in_any_order() {
        let both = matching(&[("path", "/login"), ("remote_address", "*")]);
        let entries = [("remote_address", "10.0.0.1"), ("path", "/login")];
        assert_eq!(both.key("edge", &entries).as_deref(), Some("/login|10.0.0.1"));
        assert_eq!(both.key("other", &entries), None);
        assert_eq!(both.key("edge", &[("remote_address", "10.0.0.1"), ("path", "/")]), None);
        assert_eq!(both.key("edge", &entries[..1]), None, "one is missing");
        assert_eq!(
            both.key("edge", &[entries[0], entries[0]]),
            None,
            "one is there twice, another not at all"
        );
        let one = matching(&[("remote_address", "*")]);
        assert_eq!(one.key("edge", &entries), None, "there is one more");
        assert_eq!(one.key("edge", &entries[..1]).as_deref(), Some("10.0.0.1"));
    }

    #[test]
    fn no_two_descriptors_of_a_policy_spend_under_one_key() {
        let two = matching(&[("a", "*"), ("b", "*")]);
        let values = ["x", "x|y", "|", "x\\", "\\|x", "", "y"];
        let pairs = values.iter().flat_map(|a| values.iter().map(move |b| [("a", *a), ("b", *b)]));
        let keys: BTreeSet<_> = pairs.map(|pair| two.key("edge", &pair).unwrap()).collect();
        assert_eq!(keys.len(), values.len() * values.len());
        let one = matching(&[("a", "*")]);
        assert_eq!(one.key("edge", &[("a", "x|y\\")]).as_deref(), Some("x|y\\"), "a single one is itself");
    }

    #[test]
    fn entries_read_back_as_they_were_written() {
        for entries in [&[][..], &[("a", "*")], &[("a", "x=y"), ("b", "")]] {
            let matches = matching(entries);
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
