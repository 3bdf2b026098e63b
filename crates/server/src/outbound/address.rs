//! Decides which addresses belong to the public internet.
//!
//! Other addresses are refused where a caller names the target: a caller that can make Weir call its own network can reach
//! whatever only that network may. The lists are IANA's special-purpose registries. An IPv6 address that embeds an IPv4
//! address, and is translated to it on the way, is judged by the embedded one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IPv4 networks that are not public: address and prefix length.
const PRIVATE_V4: [(Ipv4Addr, u32); 15] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),       // this network
    (Ipv4Addr::new(10, 0, 0, 0), 8),      // private
    (Ipv4Addr::new(100, 64, 0, 0), 10),   // behind a carrier's NAT
    (Ipv4Addr::new(127, 0, 0, 0), 8),     // loopback
    (Ipv4Addr::new(169, 254, 0, 0), 16),  // link-local, the metadata of clouds among it
    (Ipv4Addr::new(172, 16, 0, 0), 12),   // private
    (Ipv4Addr::new(192, 0, 0, 0), 24),    // protocol assignments
    (Ipv4Addr::new(192, 0, 2, 0), 24),    // documentation
    (Ipv4Addr::new(192, 88, 99, 0), 24),  // relays from 6to4
    (Ipv4Addr::new(192, 168, 0, 0), 16),  // private
    (Ipv4Addr::new(198, 18, 0, 0), 15),   // benchmarks
    (Ipv4Addr::new(198, 51, 100, 0), 24), // documentation
    (Ipv4Addr::new(203, 0, 113, 0), 24),  // documentation
    (Ipv4Addr::new(224, 0, 0, 0), 4),     // multicast
    (Ipv4Addr::new(240, 0, 0, 0), 4),     // reserved, broadcast
];

/// IPv6 networks within `2000::/3` that are not public. Outside of `2000::/3` only embedded IPv4 addresses can be public.
const PRIVATE_V6: [(Ipv6Addr, u32); 3] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments, Teredo, benchmarks
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
];

const GLOBAL_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
const NAT64: (Ipv6Addr, u32) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);
const SIX_TO_FOUR: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16);

#[must_use]
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let is_in =
        |(network, bits): &(Ipv4Addr, u32)| (address.to_bits() ^ network.to_bits()).leading_zeros() >= *bits;
    !PRIVATE_V4.iter().any(is_in)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let is_in =
        |(network, bits): &(Ipv6Addr, u32)| (address.to_bits() ^ network.to_bits()).leading_zeros() >= *bits;
    if let Some(embedded) = address.to_ipv4_mapped() {
        return is_public_v4(embedded);
    }
    let [.., a, b, c, d] = address.octets();
    if is_in(&NAT64) {
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    let [_, _, a, b, c, d, ..] = address.octets();
    if is_in(&SIX_TO_FOUR) {
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    is_in(&GLOBAL_V6) && !PRIVATE_V6.iter().any(is_in)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expected: bool, addresses: &str) {
        for text in addresses.split_whitespace() {
            assert_eq!(is_public(text.parse().unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn addresses_of_the_internet_are_public() {
        check(
            true,
            "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0",
        );
        check(
            true,
            "169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.3.0",
        );
        check(true, "192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 203.0.112.255 223.255.255.255");
        check(true, "2606:4700:4700::1111 2a00:1450::1 2001:4860:4860::8888 2001:200::1 3ffe::1");
    }

    #[test]
    fn private_and_reserved_ipv4_addresses_are_not_public() {
        check(
            false,
            "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.1 127.255.255.254",
        );
        check(false, "169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.168.0.1 192.168.255.255");
        check(
            false,
            "192.0.0.1 192.0.0.170 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255 198.51.100.7 203.0.113.9",
        );
        check(false, "224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255");
    }

    #[test]
    fn private_and_reserved_ipv6_addresses_are_not_public() {
        check(
            false,
            ":: ::1 ::2 fc00::1 fd12:3456::1 fe80::1 febf::1 fec0::1 ff02::1 ff0e::1 100::1 5f00::1",
        );
        check(
            false,
            "2001:db8::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:2::1 2001:10::1 2001:20::1",
        );
        check(false, "3fff::1 3fff:fff::1 4000::1 fd00:ec2::254");
    }

    #[test]
    fn an_embedded_ipv4_address_decides() {
        check(
            false,
            "::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0.0.0.0 ::127.0.0.1 ::8.8.8.8",
        );
        check(false, "64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::808:808 64:ff9b:1::a00:1");
        check(false, "2002:7f00:1:: 2002:a00:1::1 2002:a9fe:a9fe::1 2002:c0a8:101::");
        check(true, "::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1");
    }
}
