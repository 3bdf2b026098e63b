//! Ports for servers that restart on the same port after a stop or a crash.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;

use parking_lot::Mutex;

// Below Linux's ephemeral range (32768 and up). A port from `bind(0)` could be handed to another socket while its
// server is down, or a client that retries against it could even connect to itself.
const FIRST: u16 = 10_000;
const BLOCKS: u16 = 220;
const BLOCK: u16 = 100;

/// The blocks of ports that this process owns. A port without a listener may still belong to a server of another test
/// program that is starting or restarting. So each process takes whole blocks and marks them by binding a UDP socket to the
/// first port, which the system closes with the process and which does not conflict with TCP.
struct OwnedPorts {
    guards: Vec<UdpSocket>,
    rest: Range<u16>,
}

/// Returns a port on 127.0.0.1 without a listener that no other test gets while this process runs.
pub fn unused() -> u16 {
    static OWNED: Mutex<OwnedPorts> = Mutex::new(OwnedPorts { guards: Vec::new(), rest: 0..0 });
    let mut owned = OWNED.lock();
    loop {
        if let Some(port) = owned.rest.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()) {
            return port;
        }
        let (guard, block) = free_block().unwrap_or_else(|| {
            let last = FIRST + BLOCKS * BLOCK - 1;
            panic!("no free ports between {FIRST} and {last}: `ss -lntu` shows who uses them")
        });
        owned.guards.push(guard);
        owned.rest = block;
    }
}

/// Takes a block that no process owns yet.
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
    fn no_port_is_returned_twice_and_each_can_be_bound() {
        let ports: Vec<u16> = (0..3 * BLOCK).map(|_| unused()).collect();
        let mut distinct = ports.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), ports.len());
        for port in ports {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_block_has_one_owner() {
        let (_guard, block) = free_block().unwrap();
        assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, block.start)).is_err());
        let others: Vec<_> = std::iter::from_fn(free_block).take(20).collect();
        assert!(others.iter().all(|(_, other)| *other != block));
    }
}
