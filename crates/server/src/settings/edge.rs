//! Limits per address on the routes without credentials, and the proxies that may name the client's address.

use std::collections::BTreeMap;
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
    /// `[edge.networks.<name>]`: networks whose addresses have limits of their own.
    pub networks: Vec<KnownNetworks>,
}

/// Networks that are known, such as those of an office, and the limits of each of their addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownNetworks {
    pub networks: Vec<Network>,
    pub per_ip_per_second: u32,
    pub per_ip_burst: u32,
    pub sse_per_ip: u32,
}

const LIMIT: &str = "a number from 0 (no limit) to 1000000";
const NUMBER: &str = "a number from 0 to 1000000";
const NETWORKS: &str = "a list of addresses and networks such as 10.0.0.0/8";
const MAX: u32 = 1_000_000;

impl EdgeSettings {
    /// Returns how many requests of one address may come at once.
    pub(crate) const fn burst(&self) -> u32 {
        self.per_ip_burst.saturating_add(1)
    }

    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let or_nothing = format!("{NETWORKS}, or nothing");
        let mut settings = Self {
            per_ip_per_second: reader.get("edge.per_ip_per_second", 0, up_to(MAX), LIMIT)?,
            per_ip_burst: reader.get("edge.per_ip_burst", 50, up_to(MAX), NUMBER)?,
            sse_per_ip: reader.get("edge.sse_per_ip", 1_000, up_to(MAX), LIMIT)?,
            trusted_proxies: reader.get("edge.trusted_proxies", Vec::new(), networks, &or_nothing)?,
            networks: Vec::new(),
        };
        for (name, fields) in reader.tables("edge.networks") {
            let known = settings.read_networks(&name, &fields)?;
            settings.networks.push(known);
        }
        Ok(settings)
    }

    /// Reads known networks. A limit that they do not name is that of all addresses.
    fn read_networks(
        &self,
        name: &str,
        fields: &BTreeMap<String, String>,
    ) -> Result<KnownNetworks, SettingError> {
        let mut known = KnownNetworks {
            networks: Vec::new(),
            per_ip_per_second: self.per_ip_per_second,
            per_ip_burst: self.per_ip_burst,
            sse_per_ip: self.sse_per_ip,
        };
        for (field, text) in fields {
            let wrong = |allowed| SettingError::new(format!("edge.networks.{name}.{field}"), text, allowed);
            let number = |allowed| up_to(MAX)(text).ok_or_else(|| wrong(allowed));
            match field.as_str() {
                "networks" => known.networks = networks(text).ok_or_else(|| wrong(NETWORKS))?,
                "per_ip_per_second" => known.per_ip_per_second = number(LIMIT)?,
                "per_ip_burst" => known.per_ip_burst = number(NUMBER)?,
                "sse_per_ip" => known.sse_per_ip = number(LIMIT)?,
                _ => {
                    return Err(wrong(
                        "left out, or networks, per_ip_per_second, per_ip_burst or sse_per_ip",
                    ));
                }
            }
        }
        if known.networks.is_empty() {
            return Err(SettingError::new(format!("edge.networks.{name}.networks"), "", NETWORKS));
        }
        Ok(known)
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

    /// Returns the length of the prefix: of two networks that contain an address, the longer describes it better.
    #[must_use]
    pub const fn prefix(&self) -> u32 {
        self.prefix
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
    fn known_networks_take_over_the_limits_that_they_do_not_name() {
        let read = |text: &str| {
            let path = std::path::PathBuf::from("weir.toml");
            let values = super::super::source::flatten_toml(&path, text).unwrap();
            let sources = super::super::source::Sources { file: Some((path, values)), ..Default::default() };
            EdgeSettings::read(&mut SettingsReader::new(sources)).map_err(|error| error.to_string())
        };
        let office =
            "[edge.networks.office]\nnetworks = [\"10.0.0.0/8\", \"fd00::/8\"]\nper_ip_per_second = 900\n";
        let settings = read(&format!("[edge]\nper_ip_burst = 7\n{office}")).unwrap();
        let known = &settings.networks[0];
        assert_eq!((known.per_ip_per_second, known.per_ip_burst, known.sse_per_ip), (900, 7, 1_000));
        assert_eq!(known.networks.len(), 2);
        for (wrong, named) in [
            (format!("{office}burst = 1"), "edge.networks.office.burst"),
            (format!("{office}per_ip_burst = -1"), "edge.networks.office.per_ip_burst"),
            ("[edge.networks.office]\nper_ip_burst = 1".to_owned(), "edge.networks.office.networks"),
            ("[edge.networks.office]\nnetworks = [\"office\"]".to_owned(), "10.0.0.0/8"),
        ] {
            let sentence = read(&wrong).unwrap_err();
            assert!(sentence.contains(named), "{sentence}");
        }
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
