//! The messages and the service of Envoy's rate limit service, as `build.rs` generates them from `proto/`.

use std::time::Duration;

pub use self::envoy::config::core::v3::HeaderValue;
pub use self::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
pub use self::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
pub use self::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
pub(super) use self::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer, SERVICE_NAME,
};
pub use self::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
pub use self::envoy::r#type::v3::RateLimitUnit;

/// One module per package, because generated code refers to other packages by their paths.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::doc_markdown,
    clippy::use_self,
    unreachable_pub,
    reason = "generated code"
)]
mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                tonic::include_proto!("envoy.config.core.v3");
            }
        }
    }
    pub mod extensions {
        pub mod common {
            pub mod ratelimit {
                pub mod v3 {
                    tonic::include_proto!("envoy.extensions.common.ratelimit.v3");
                }
            }
        }
    }
    pub mod service {
        pub mod ratelimit {
            pub mod v3 {
                tonic::include_proto!("envoy.service.ratelimit.v3");
            }
        }
    }
    pub mod r#type {
        pub mod v3 {
            tonic::include_proto!("envoy.r#type.v3");
        }
    }
}

impl RateLimitDescriptor {
    #[must_use]
    pub fn new(entries: &[(&str, &str)]) -> Self {
        let entry =
            |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
        Self { entries: entries.iter().map(entry).collect(), limit: None, hits_addend: None }
    }
}

/// Requests and responses have separate types for units, with the same numbers.
impl RateLimitUnit {
    const LENGTHS_S: [(Self, u64); 7] = [
        (Self::Second, 1),
        (Self::Minute, 60),
        (Self::Hour, 3_600),
        (Self::Day, 86_400),
        (Self::Week, 7 * 86_400),
        (Self::Month, 30 * 86_400),
        (Self::Year, 365 * 86_400),
    ];

    #[must_use]
    pub fn length(self) -> Option<Duration> {
        let entry = Self::LENGTHS_S.iter().find(|(unit, _)| *unit == self);
        entry.map(|(_, seconds)| Duration::from_secs(*seconds))
    }

    /// Returns `Unknown` if no unit has this length.
    #[must_use]
    pub fn from_length(length: Duration) -> Self {
        let entry = Self::LENGTHS_S.iter().find(|(_, seconds)| Duration::from_secs(*seconds) == length);
        entry.map_or(Self::Unknown, |(unit, _)| *unit)
    }
}

#[cfg(test)]
mod tests {
    use super::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
    use super::*;

    #[test]
    fn units_are_converted_from_their_lengths() {
        for (unit, seconds) in [
            (RateLimitUnit::Second, 1),
            (RateLimitUnit::Minute, 60),
            (RateLimitUnit::Day, 86_400),
            (RateLimitUnit::Unknown, 90),
        ] {
            assert_eq!(RateLimitUnit::from_length(Duration::from_secs(seconds)), unit);
        }
        assert_eq!(RateLimitUnit::Unknown.length(), None);
    }

    #[test]
    fn units_have_the_same_numbers_in_requests_and_responses() {
        for number in 0..=8 {
            let (in_request, in_response) = (RateLimitUnit::try_from(number), Unit::try_from(number));
            assert_eq!(
                in_request.map(|unit| unit.as_str_name()).ok(),
                in_response.map(|unit| unit.as_str_name()).ok()
            );
        }
    }
}
