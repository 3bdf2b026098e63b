//! Ports for servers that must come back on the same port after a stop or a crash.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;

use parking_lot::Mutex;

// Below Linux's ephemeral range (32768 and up). A port from `bind(0)` could be handed to another socket while its
// server is down, or a client that retries against it could even connect to itself.
const FIRST: u16 = 10_000;
const BLOCKS: u16 = 220;
const BLOCK: u16 = 100;

/// What this process has to itself. That nobody listens on a port says little: its server may be starting, or be down for
/// a moment, in another test program that runs at the same time. So each takes whole blocks, and shows it by a socket
/// that goes with the process: UDP, where a block's first port is in nobody's way.
struct Mine {
    guards: Vec<UdpSocket>,
    rest: Range<u16>,
}

/// A port on 127.0.0.1 that nobody listens on, and that no test is given again while this process runs.
pub fn unused() -> u16 {
    static MINE: Mutex<Mine> = Mutex::new(Mine { guards: Vec::new(), rest: 0..0 });
    let mut mine = MINE.lock();
    loop {
        if let Some(port) = mine.rest.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()) {
            return port;
        }
        let (guard, block) = free_block().unwrap_or_else(|| {
            let last = FIRST + BLOCKS * BLOCK - 1;
            panic!("no free ports between {FIRST} and {last}: see who is there with `ss -lntu`")
        });
        mine.guards.push(guard);
        mine.rest = block;
    }
}

/// A block that no process has, this one included.
fn free_block() -> Option<(UdpSocket, Range<u16>)> {
    let start = fastrand::u16(0..BLOCKS);
    (0..BLOCKS).find_map(|offset| {
        let first = FIRST + (start + offset) % BLOCKS * BLOCK;
        let guard = UdpSocket::bind((Ipv4Addr::LOCALHOST, first)).ok()?;
        Some((guard, first..first + BLOCK))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_bound() {
        let ports: Vec<u16> = (0..3 * BLOCK).map(|_| unused()).collect();
        let mut apart = ports.clone();
        apart.sort_unstable();
        apart.dedup();
        assert_eq!(apart.len(), ports.len());
        for port in ports {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_block_has_one_holder() {
        let (_guard, block) = free_block().unwrap();
        assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, block.start)).is_err());
        let others: Vec<_> = std::iter::from_fn(free_block).take(20).collect();
        assert!(others.iter().all(|(_, other)| *other != block));
    }
}
