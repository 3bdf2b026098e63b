//! Limits per address on the routes without credentials, and the proxies that may name the client's address.

use std::net::IpAddr;

use super::source::{SettingError, SettingsReader};
use crate::sale::settings::up_to;

/// Limits per address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeSettings {
    /// `edge.per_ip_per_second`: requests of one address per second; 0 is no limit.
    pub per_ip_per_second: u32,
    /// `edge.per_ip_burst`: additional requests that may come at once.
    pub per_ip_burst: u32,
    /// `edge.sse_per_ip`: open event streams of one address; 0 is no limit.
    pub sse_per_ip: u32,
    /// `edge.trusted_proxies`: proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<Network>,
}

impl EdgeSettings {
    /// Returns how many requests of one address may come at once.
    pub(crate) const fn burst(&self) -> u32 {
        self.per_ip_burst.saturating_add(1)
    }

    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let number = "a number from 0 to 1000000";
        let limit = "a number from 0 (no limit) to 1000000";
        Ok(Self {
            per_ip_per_second: reader.get("edge.per_ip_per_second", 0, up_to(1_000_000), limit)?,
            per_ip_burst: reader.get("edge.per_ip_burst", 50, up_to(1_000_000), number)?,
            sse_per_ip: reader.get("edge.sse_per_ip", 1_000, up_to(1_000_000), limit)?,
            trusted_proxies: reader.get(
                "edge.trusted_proxies",
                Vec::new(),
                networks,
                "a list of addresses and networks such as 10.0.0.0/8, or nothing",
            )?,
        })
    }
}

fn networks(text: &str) -> Option<Vec<Network>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(Network::parse).collect()
}

/// A network of addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    bits: u128,
    /// The prefix length, of the 128 bits of an IPv6 address.
    prefix: u32,
}

impl Network {
    /// Parses `10.0.0.0/8`, `fd00::/8` or a single address.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse::<u32>().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let (width, offset) = if address.is_ipv4() { (32, 96) } else { (128, 0) };
        let prefix = prefix.unwrap_or(width);
        (prefix <= width).then(|| Self { bits: bits(address), prefix: prefix + offset })
    }

    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let shift = 128 - self.prefix;
        self.bits.checked_shr(shift).unwrap_or(0) == bits(address).checked_shr(shift).unwrap_or(0)
    }
}

/// Maps an IPv4 address to IPv6, so that both spellings are one address.
fn bits(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_the_addresses_with_their_prefix() {
        let contains = |network: &str, address: &str| {
            Network::parse(network).unwrap().contains(address.parse().unwrap())
        };
        assert!(contains("10.0.0.0/8", "10.200.3.4"));
        assert!(contains("10.0.0.0/8", "::ffff:10.1.1.1"));
        assert!(!contains("10.0.0.0/8", "11.0.0.1"));
        assert!(contains("127.0.0.1", "127.0.0.1"));
        assert!(!contains("127.0.0.1", "127.0.0.2"));
        assert!(contains("fd00::/8", "fd12::1"));
        assert!(!contains("fd00::/8", "fe80::1"));
        assert!(contains("0.0.0.0/0", "1.2.3.4"));
        assert!(!contains("0.0.0.0/0", "2001:db8::1"), "all of IPv4 does not include IPv6");
        assert!(contains("::/0", "1.2.3.4"));
    }

    #[test]
    fn malformed_networks_are_refused() {
        for bad in ["x", "10.0.0.0/33", "::/129", "10.0.0/8", "/8", "10.0.0.0/", "10.0.0.0/-1"] {
            assert_eq!(Network::parse(bad), None, "{bad}");
        }
        assert_eq!(networks(""), Some(Vec::new()));
        assert_eq!(networks("10.0.0.0/8, ::1").map(|list| list.len()), Some(2));
        assert_eq!(networks("10.0.0.0/8,x"), None);
    }
}
