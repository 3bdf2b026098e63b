//! The messages of Envoy's rate limit service, as far as Weir reads or writes them. `proto/` says the same to others.

use std::time::Duration;

use prost::{Enumeration, Message};

/// What a proxy asks.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitRequest {
    /// Policies name the domain they are about.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// What is to be limited.
    #[prost(message, repeated, tag = "2")]
    pub descriptors: Vec<RateLimitDescriptor>,
    /// What each descriptor spends that does not say so itself. Not set, or 0, is 1.
    #[prost(uint32, tag = "3")]
    pub hits_addend: u32,
}

/// Something to be limited.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitDescriptor {
    /// What it is about.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Entry>,
    /// A limit in place of the policy's.
    #[prost(message, optional, tag = "2")]
    pub limit: Option<RateLimitOverride>,
    /// What it spends. Set to 0, it only looks.
    #[prost(message, optional, tag = "3")]
    pub hits_addend: Option<u64>,
}

impl RateLimitDescriptor {
    /// A descriptor with these entries.
    #[must_use]
    pub fn new(entries: &[(&str, &str)]) -> Self {
        let entry =
            |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
        Self { entries: entries.iter().map(entry).collect(), limit: None, hits_addend: None }
    }
}

/// A name and a value.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Entry {
    /// The name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// So many in a unit of time.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RateLimitOverride {
    /// How many; 0 allows nothing.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// In which time.
    #[prost(enumeration = "Unit", tag = "2")]
    pub unit: i32,
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Unit {
    /// None of the others.
    Unknown = 0,
    /// A second.
    Second = 1,
    /// A minute.
    Minute = 2,
    /// An hour.
    Hour = 3,
    /// 24 hours.
    Day = 4,
    /// 30 days.
    Month = 5,
    /// 365 days.
    Year = 6,
    /// 7 days.
    Week = 7,
}

impl Unit {
    const LENGTHS_S: [(Self, u64); 7] = [
        (Self::Second, 1),
        (Self::Minute, 60),
        (Self::Hour, 3_600),
        (Self::Day, 86_400),
        (Self::Week, 7 * 86_400),
        (Self::Month, 30 * 86_400),
        (Self::Year, 365 * 86_400),
    ];

    /// How long it is.
    #[must_use]
    pub fn length(self) -> Option<Duration> {
        let found = Self::LENGTHS_S.iter().find(|(unit, _)| *unit == self);
        found.map(|(_, seconds)| Duration::from_secs(*seconds))
    }

    /// The unit of this length.
    #[must_use]
    pub fn of(length: Duration) -> Self {
        let found = Self::LENGTHS_S.iter().find(|(_, seconds)| Duration::from_secs(*seconds) == length);
        found.map_or(Self::Unknown, |(unit, _)| *unit)
    }
}

/// What a proxy is told.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitResponse {
    /// Of all descriptors.
    #[prost(enumeration = "Code", tag = "1")]
    pub overall_code: i32,
    /// Of each descriptor.
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<DescriptorStatus>,
    /// What is added to the response that the proxy's caller gets.
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<HeaderValue>,
}

/// Whether there is room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Code {
    /// Never said.
    Unknown = 0,
    /// There is.
    Ok = 1,
    /// There is not.
    OverLimit = 2,
}

/// Where one descriptor stands.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DescriptorStatus {
    /// Whether there is room.
    #[prost(enumeration = "Code", tag = "1")]
    pub code: i32,
    /// The limit; absent where no policy is about the descriptor.
    #[prost(message, optional, tag = "2")]
    pub current_limit: Option<RateLimit>,
    /// What is left.
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
    /// Over the limit: until the same would be allowed. Otherwise: until nothing that was spent counts.
    #[prost(message, optional, tag = "4")]
    pub duration_until_reset: Option<Span>,
}

/// A limit.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RateLimit {
    /// How many.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// In which time.
    #[prost(enumeration = "Unit", tag = "2")]
    pub unit: i32,
    /// The name of the policy.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// A duration, `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Span {
    /// Whole seconds.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// The rest.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self {
            seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
        }
    }
}

/// A header.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeaderValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value.
    #[prost(string, tag = "2")]
    pub value: String,
}
