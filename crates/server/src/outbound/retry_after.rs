//! `Retry-After`: a number of seconds, or a date.

use std::time::{Duration, SystemTime};

/// How long to wait; none when the header is neither. A date that is past is no wait at all.
pub(super) fn parse(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More seconds than a number can hold are as many as it can.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates_are_waits_and_anything_else_is_none() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_770);
        let parse = |text| parse(text, now).map(|wait| wait.as_secs());
        assert_eq!(parse("0"), Some(0));
        assert_eq!(parse(" 120 "), Some(120));
        assert_eq!(parse("99999999999999999999999"), Some(u64::MAX));
        assert_eq!(parse("Sun, 06 Nov 1994 08:49:37 GMT"), Some(7));
        assert_eq!(parse("Sunday, 06-Nov-94 08:49:37 GMT"), Some(7), "RFC 850");
        assert_eq!(parse("Sun Nov  6 08:49:37 1994"), Some(7), "asctime");
        assert_eq!(parse("Sun, 06 Nov 1994 08:49:00 GMT"), Some(0), "past");
        for other in ["", "-1", "1.5", "+3", "soon", "Sun, 31 Feb 1994 08:49:37 GMT", "1e3"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
