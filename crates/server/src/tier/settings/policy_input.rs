//! Policies as operators write them, over HTTP or in a file: which fields each kind has, and which values are valid.

use std::time::Duration;

use weir_core::tier::{
    Concurrency, ConcurrencyError, FixedWindow, Limit, LimitError, SlidingWindow, TokenBucket,
};
use weir_store::tier::{ConcurrencySpec, Match, OnOutage, PolicySpec};

/// The fields of a policy, not yet validated.
#[derive(Debug, Default)]
pub(crate) struct PolicyFields {
    pub kind: Option<String>,
    /// Of windows and of concurrency.
    pub limit: Option<i128>,
    /// Only of windows.
    pub window: Option<String>,
    /// Only of buckets.
    pub capacity: Option<i128>,
    /// Only of buckets.
    pub refill: Option<i128>,
    /// Only of buckets.
    pub period: Option<String>,
    /// Only of concurrency.
    pub ttl: Option<String>,
    pub shadow: bool,
    pub on_outage: Option<String>,
    pub matches: Option<Match>,
}

/// What an operator defines under a policy's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyDefinition {
    Limit(PolicySpec),
    Concurrency(ConcurrencySpec),
}

impl PolicyDefinition {
    /// The proxy descriptors to which the policy applies.
    #[must_use]
    pub const fn matches(&self) -> Option<&Match> {
        match self {
            Self::Limit(spec) => spec.matches.as_ref(),
            Self::Concurrency(_) => None,
        }
    }
}

/// Which field is wrong, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PolicyFieldError {
    pub field: &'static str,
    /// Completes a sentence that begins with the field's name: "must be from 1 to 5".
    pub problem: String,
}

/// How many descriptor entries a policy can match.
const ENTRIES_MAX: usize = 16;
/// The longest name or value of an entry, in characters.
const ENTRY_MAX: usize = 255;

impl PolicyFields {
    /// Validates the fields and returns the policy they describe.
    pub(crate) fn into_definition(self) -> Result<PolicyDefinition, PolicyFieldError> {
        if self.kind.as_deref() == Some("concurrency") {
            self.into_concurrency().map(PolicyDefinition::Concurrency)
        } else {
            self.into_spec().map(PolicyDefinition::Limit)
        }
    }

    fn into_concurrency(self) -> Result<ConcurrencySpec, PolicyFieldError> {
        let others = [
            ("window", self.window.is_some()),
            ("capacity", self.capacity.is_some()),
            ("refill", self.refill.is_some()),
            ("period", self.period.is_some()),
            // A proxy could not give a permit back.
            ("match", self.matches.is_some()),
        ];
        self.refuse(&others, "concurrency")?;
        let limit = self.limit.ok_or_else(|| PolicyFieldError::new("limit", "is required"))?;
        let (limit, ttl) = (u32::try_from(limit).unwrap_or(0), span("ttl", self.ttl.as_deref())?);
        let rule = Concurrency::new(limit, ttl).map_err(|problem| match problem {
            ConcurrencyError::Limit => PolicyFieldError::new("limit", problem.to_string()),
            ConcurrencyError::Ttl(_) => PolicyFieldError::new("ttl", problem.to_string()),
        })?;
        Ok(ConcurrencySpec { rule, shadow: self.shadow, on_outage: self.on_outage()? })
    }

    /// Validates the fields of a policy of another kind than concurrency.
    pub(crate) fn into_spec(self) -> Result<PolicySpec, PolicyFieldError> {
        let (limit, on_outage) = (self.limit()?, self.on_outage()?);
        if let Some(matches) = &self.matches {
            check_match(matches)?;
        }
        Ok(PolicySpec { limit, shadow: self.shadow, on_outage, matches: self.matches })
    }

    fn on_outage(&self) -> Result<OnOutage, PolicyFieldError> {
        match self.on_outage.as_deref() {
            None => Ok(OnOutage::default()),
            Some(text) => OnOutage::parse(text)
                .ok_or_else(|| PolicyFieldError::new("onOutage", "must be one of open, closed, local")),
        }
    }

    fn limit(&self) -> Result<Limit, PolicyFieldError> {
        let kinds = "must be one of fixed_window, token_bucket, sliding_window, concurrency";
        let kind = self.kind.as_deref().ok_or_else(|| PolicyFieldError::new("kind", "is required"))?;
        if !["fixed_window", "token_bucket", "sliding_window"].contains(&kind) {
            return Err(PolicyFieldError::new("kind", kinds));
        }
        self.refuse(&[("ttl", self.ttl.is_some())], kind)?;
        if kind == "token_bucket" {
            self.refuse(&[("limit", self.limit.is_some()), ("window", self.window.is_some())], kind)?;
            let (capacity, refill) = (amount("capacity", self.capacity)?, amount("refill", self.refill)?);
            let period = span("period", self.period.as_deref())?;
            let bucket = TokenBucket::new(capacity, refill, period);
            return bucket.map(Limit::TokenBucket).map_err(|problem| PolicyFieldError::of(problem, "period"));
        }
        let others = [
            ("capacity", self.capacity.is_some()),
            ("refill", self.refill.is_some()),
            ("period", self.period.is_some()),
        ];
        self.refuse(&others, kind)?;
        let (limit, window) = (amount("limit", self.limit)?, span("window", self.window.as_deref())?);
        let limit = if kind == "fixed_window" {
            FixedWindow::new(limit, window).map(Limit::FixedWindow)
        } else {
            SlidingWindow::new(limit, window).map(Limit::SlidingWindow)
        };
        limit.map_err(|problem| PolicyFieldError::of(problem, "window"))
    }

    fn refuse(&self, fields: &[(&'static str, bool)], kind: &str) -> Result<(), PolicyFieldError> {
        match fields.iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => Err(PolicyFieldError::new(field, format!("must be left out of a {kind}"))),
            None => Ok(()),
        }
    }
}

impl PolicyFieldError {
    fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }

    /// The amounts have been checked before, so the duration must be wrong.
    fn of(problem: LimitError, span_field: &'static str) -> Self {
        Self::new(span_field, problem.to_string())
    }
}

fn amount(field: &'static str, value: Option<i128>) -> Result<u32, PolicyFieldError> {
    let value = value.ok_or_else(|| PolicyFieldError::new(field, "is required"))?;
    let amount = u32::try_from(value).ok().filter(|amount| (1..=Limit::MAX).contains(amount));
    amount.ok_or_else(|| PolicyFieldError::new(field, LimitError::Amount.to_string()))
}

fn span(field: &'static str, text: Option<&str>) -> Result<Duration, PolicyFieldError> {
    let text = text.ok_or_else(|| PolicyFieldError::new(field, "is required"))?;
    parse_span(text).ok_or_else(|| PolicyFieldError::new(field, LimitError::Period.to_string()))
}

/// Parses an ISO 8601 duration of fixed length: a day has 24 hours; months and years are refused.
#[must_use]
pub(crate) fn parse_span(text: &str) -> Option<Duration> {
    if !text.starts_with(['P', 'p']) {
        return None;
    }
    let span: jiff::Span = text.parse().ok()?;
    if span.get_years() != 0 || span.get_months() != 0 {
        return None;
    }
    let fixed = span.to_duration(jiff::SpanRelativeTo::days_are_24_hours()).ok()?;
    Duration::try_from(fixed).ok()
}

fn check_match(matches: &Match) -> Result<(), PolicyFieldError> {
    let is_plain = |text: &str| text.chars().count() <= ENTRY_MAX && !text.chars().any(char::is_control);
    if matches.domain.is_empty() || !is_plain(&matches.domain) {
        let problem = "must have a domain of 1 to 255 characters, none of them a control character";
        return Err(PolicyFieldError::new("match", problem));
    }
    let are_plain = matches
        .entries
        .iter()
        .all(|(name, value)| !name.is_empty() && !value.is_empty() && is_plain(name) && is_plain(value));
    if !(1..=ENTRIES_MAX).contains(&matches.entries.len()) || !are_plain {
        let problem = "must have 1 to 16 entries with names and values of 1 to 255 characters, such as \
                       {\"remote_address\":\"*\"}";
        return Err(PolicyFieldError::new("match", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn window(kind: &str) -> PolicyFields {
        PolicyFields {
            kind: Some(kind.to_owned()),
            limit: Some(5),
            window: Some("PT1M".to_owned()),
            ..PolicyFields::default()
        }
    }

    fn bucket() -> PolicyFields {
        PolicyFields {
            kind: Some("token_bucket".to_owned()),
            capacity: Some(5),
            refill: Some(5),
            period: Some("PT1M".to_owned()),
            ..PolicyFields::default()
        }
    }

    #[test]
    fn each_kind_has_its_fields() {
        assert!(matches!(window("fixed_window").into_spec().unwrap().limit, Limit::FixedWindow(_)));
        assert!(matches!(window("sliding_window").into_spec().unwrap().limit, Limit::SlidingWindow(_)));
        assert!(matches!(bucket().into_spec().unwrap().limit, Limit::TokenBucket(_)));
        let field = |fields: PolicyFields| fields.into_spec().unwrap_err().field;
        assert_eq!(field(PolicyFields::default()), "kind");
        assert_eq!(field(window("leaky")), "kind");
        assert_eq!(field(PolicyFields { limit: None, ..window("fixed_window") }), "limit");
        assert_eq!(field(PolicyFields { limit: Some(0), ..window("fixed_window") }), "limit");
        assert_eq!(field(PolicyFields { window: Some("1m".to_owned()), ..window("fixed_window") }), "window");
        assert_eq!(
            field(PolicyFields { window: Some("P1M".to_owned()), ..window("fixed_window") }),
            "window"
        );
        assert_eq!(field(PolicyFields { refill: Some(1), ..window("sliding_window") }), "refill");
        assert_eq!(field(PolicyFields { capacity: Some(1 << 40), ..bucket() }), "capacity");
        assert_eq!(field(PolicyFields { period: None, ..bucket() }), "period");
        assert_eq!(field(PolicyFields { limit: Some(1), ..bucket() }), "limit");
        assert_eq!(field(PolicyFields { on_outage: Some("ajar".to_owned()), ..bucket() }), "onOutage");
        assert_eq!(field(PolicyFields { ttl: Some("PT1M".to_owned()), ..bucket() }), "ttl");
    }

    #[test]
    fn concurrency_has_a_limit_and_a_ttl() {
        let concurrency = || PolicyFields {
            kind: Some("concurrency".to_owned()),
            limit: Some(5),
            ttl: Some("PT30S".to_owned()),
            ..PolicyFields::default()
        };
        let PolicyDefinition::Concurrency(spec) = concurrency().into_definition().unwrap() else {
            panic!("its kind is concurrency")
        };
        assert_eq!((spec.rule.limit(), spec.rule.ttl()), (5, Duration::from_secs(30)));
        assert!(matches!(bucket().into_definition(), Ok(PolicyDefinition::Limit(_))));
        let field = |fields: PolicyFields| fields.into_definition().unwrap_err().field;
        for limit in [None, Some(0), Some(-1), Some(10_001), Some(1 << 40)] {
            assert_eq!(field(PolicyFields { limit, ..concurrency() }), "limit");
        }
        for ttl in [None, Some("30"), Some("PT0S"), Some("P1M"), Some("P400D")] {
            assert_eq!(field(PolicyFields { ttl: ttl.map(str::to_owned), ..concurrency() }), "ttl");
        }
        assert_eq!(field(PolicyFields { window: Some("PT1M".to_owned()), ..concurrency() }), "window");
        assert_eq!(field(PolicyFields { refill: Some(1), ..concurrency() }), "refill");
        let matches = Some(Match { domain: "edge".to_owned(), entries: BTreeMap::new() });
        assert_eq!(field(PolicyFields { matches, ..concurrency() }), "match");
    }

    #[test]
    fn a_match_needs_a_domain_and_entries() {
        let with = |domain: &str, entries: &[(&str, &str)]| {
            let entries: BTreeMap<_, _> =
                entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let matches = Some(Match { domain: domain.to_owned(), entries });
            PolicyFields { matches, ..bucket() }.into_spec()
        };
        assert!(with("edge", &[("remote_address", "*")]).is_ok());
        assert!(with(&"ü".repeat(255), &[("a", "*")]).is_ok());
        assert!(with(&"ü".repeat(256), &[("a", "*")]).is_err());
        for (domain, entries) in
            [("", &[("a", "*")][..]), ("edge", &[]), ("edge", &[("a", "")]), ("e\n", &[("a", "b")])]
        {
            assert_eq!(with(domain, entries).unwrap_err().field, "match");
        }
    }
}
