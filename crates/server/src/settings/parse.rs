//! Parsers of setting values.

use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use url::{Host, Url};

/// Parses a duration from 1 ms to a day: `500ms`, `2s`, `1m 30s`.
#[must_use]
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let span: jiff::SignedDuration = text.trim().parse().ok()?;
    let span = Duration::try_from(span).ok()?;
    (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(&span).then_some(span)
}

/// Parses a size in bytes: `65536`, `64KiB`, `1MiB`.
#[must_use]
pub(crate) fn bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor: usize = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(factor).filter(|bytes| *bytes > 0)
}

/// Returns a parser of counts from 1 to `max`.
pub(crate) fn count(max: usize) -> impl Fn(&str) -> Option<usize> {
    move |text| text.trim().parse().ok().filter(|count| (1..=max).contains(count))
}

/// Returns a parser of numbers from 0 to `max`.
pub(crate) fn number_from_zero(max: u64) -> impl Fn(&str) -> Option<u64> {
    move |text| text.trim().parse().ok().filter(|number| *number <= max)
}

/// Parses `true` or `false`, also written `1` or `0`.
#[must_use]
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text.trim() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// Parses an `http://` or `https://` URL.
pub(crate) fn http_url(text: &str) -> Option<Url> {
    let url: Url = text.trim().parse().ok()?;
    (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(url)
}

/// Parses an `https://` URL, or an `http://` one that stays on this machine: for what nobody on the way may change. Empty means
/// none.
pub(crate) fn optional_trusted_url(text: &str) -> Option<Option<Url>> {
    if text.is_empty() {
        return Some(None);
    }
    let url: Url = text.trim().parse().ok()?;
    let is_local = match url.host()? {
        Host::Domain(name) => name == "localhost",
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.to_canonical().is_loopback(),
    };
    let is_allowed = url.scheme() == "https" || (url.scheme() == "http" && is_local);
    is_allowed.then_some(Some(url))
}

/// As [`http_url`]; empty means none.
pub(crate) fn optional_url(text: &str) -> Option<Option<Url>> {
    if text.is_empty() { Some(None) } else { http_url(text).map(Some) }
}

/// Checks that a file, if one is named, has certificates in PEM.
pub(crate) fn certificates_file(text: &str) -> Option<Option<PathBuf>> {
    if text.is_empty() {
        return Some(None);
    }
    let mut certificates = CertificateDer::pem_file_iter(text).ok()?.peekable();
    certificates.peek()?;
    certificates.all(|certificate| certificate.is_ok()).then(|| Some(PathBuf::from(text)))
}

/// Checks that a file, if one is named, has a private key in PEM.
pub(crate) fn private_key_file(text: &str) -> Option<Option<PathBuf>> {
    if text.is_empty() {
        return Some(None);
    }
    PrivateKeyDer::from_pem_file(text).ok().map(|_key| Some(PathBuf::from(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_bounds() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("1m 30s"), Some(Duration::from_secs(90)));
        for bad in ["", "2", "0s", "-1s", "2 weeks", "100000h", "soon"] {
            assert_eq!(duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn sizes_are_binary_and_positive() {
        assert_eq!(bytes("1MiB"), Some(1_048_576));
        assert_eq!(bytes("65536"), Some(65_536));
        for bad in ["", "0", "1MB", "-1", "99999999999999999999", "18446744073709551615GiB"] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }
}
