//! Ports for servers that must come back on the same port after a stop or a crash.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

// Below Linux's ephemeral range (32768 and up). A port from `bind(0)` could be handed to another socket while its
// server is down, or a client that retries against it could even connect to itself.
const FIRST: u16 = 10_000;
const COUNT: u16 = 22_000;

/// A port on 127.0.0.1 that nobody listens on, never the same one twice in this process.
pub fn unused() -> u16 {
    static START: OnceLock<u16> = OnceLock::new();
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let start = *START.get_or_init(|| fastrand::u16(0..COUNT));
    for _ in 0..COUNT {
        let offset = (u32::from(start) + u32::from(TAKEN.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
        let port = FIRST + u16::try_from(offset).expect("an offset below COUNT fits");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}: see what listens there with `ss -ltn`", FIRST + COUNT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_bound() {
        let first = unused();
        let second = unused();
        assert_ne!(first, second);
        TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
    }
}
