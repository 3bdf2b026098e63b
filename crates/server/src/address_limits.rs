//! What one address may do: so many requests a second, so many event streams at a time. And how many event streams and long
//! polls there may be in all: they last long, and must leave connections to everybody else.
//!
//! An address is the connection's, or, behind a proxy that is trusted, the one the proxy names. Of IPv6 it is the /64: whoever
//! has one address there has all of them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_store::throttle::Throttle;

use crate::settings::edge::{EdgeSettings, Network};

const FORWARDED_FOR: &str = "x-forwarded-for";

/// What one address may do.
#[derive(Debug)]
pub struct AddressLimits {
    requests: Option<Arc<dyn Throttle>>,
    streams: Option<Streams>,
    /// Places for event streams and long polls of all addresses.
    long_lived: Arc<Semaphore>,
    max_streams: usize,
    trusted: Vec<Network>,
    counters: AddressCounters,
}

/// What is counted here.
#[derive(Debug, Default)]
pub struct AddressCounters {
    /// Calls and streams refused because their address makes too many.
    pub limited: Counter,
    /// Streams and long polls refused because there are too many in all.
    pub streams_full: Counter,
}

#[derive(Debug)]
struct Streams {
    max: u32,
    open: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// The place of an event stream; dropped with the stream.
#[derive(Debug)]
pub struct StreamPlace {
    _of_address: Option<AddressPlace>,
    _of_server: LongLivedPlace,
}

/// The place of a stream among those of its address.
#[derive(Debug)]
struct AddressPlace {
    address: IpAddr,
    open: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// The place of a stream or a long poll among those of all addresses.
#[derive(Debug)]
pub struct LongLivedPlace(#[expect(dead_code, reason = "held, not read")] OwnedSemaphorePermit);

/// Too many of its kind: how long to wait for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany(pub Duration);

/// There are as many event streams and long polls as the server may have (`http.max_streams`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyStreams;

/// Why there is no place for an event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRefusal {
    /// Its address has too many.
    OfAddress(TooMany),
    /// The server has too many.
    OfServer(TooManyStreams),
}

impl AddressLimits {
    /// What the settings allow. `requests` limits requests, if anything does.
    #[must_use]
    pub fn new(
        settings: &EdgeSettings,
        requests: Option<Arc<dyn Throttle>>,
        max_streams: usize,
        counters: AddressCounters,
    ) -> Self {
        let EdgeSettings { sse_per_ip, trusted_proxies, .. } = settings;
        Self {
            requests,
            streams: (*sse_per_ip > 0).then(|| Streams { max: *sse_per_ip, open: Arc::default() }),
            long_lived: Arc::new(Semaphore::new(max_streams)),
            max_streams,
            trusted: trusted_proxies.clone(),
            counters,
        }
    }

    /// Who asks: the last address on the way here that is not a trusted proxy's.
    #[must_use]
    pub fn address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let is_trusted = |address: &IpAddr| self.trusted.iter().any(|network| network.contains(*address));
        let peer = peer.to_canonical();
        if !is_trusted(&peer) {
            return peer;
        }
        let values = headers.get_all(FORWARDED_FOR).iter().rev();
        let hops = values.flat_map(|value| value.to_str().unwrap_or_default().rsplit(','));
        let mut nearest = peer;
        for hop in hops {
            // What is no address was not written by a proxy that is trusted.
            let Some(address) = parse_hop(hop) else { return nearest };
            nearest = address;
            if !is_trusted(&address) {
                break;
            }
        }
        nearest
    }

    /// Counts a request of an address.
    /// Fails when it makes too many.
    pub fn request(&self, address: IpAddr) -> Result<(), TooMany> {
        let Some(requests) = &self.requests else { return Ok(()) };
        let throttled = requests.take(&key(address));
        if throttled.is_allowed {
            return Ok(());
        }
        self.counters.limited.inc();
        Err(TooMany(throttled.limit_state.next_after))
    }

    /// A place for an event stream.
    /// Fails when the address, or the server, has too many open.
    pub fn stream(&self, address: IpAddr) -> Result<StreamPlace, StreamRefusal> {
        let of_address = self.streams.as_ref().map(|streams| streams.place(caller(address))).transpose();
        let of_address = of_address.map_err(|refusal| {
            self.counters.limited.inc();
            StreamRefusal::OfAddress(refusal)
        })?;
        let of_server = self.long_lived().map_err(StreamRefusal::OfServer)?;
        Ok(StreamPlace { _of_address: of_address, _of_server: of_server })
    }

    /// A place for a stream whose address does not matter, or for a long poll.
    /// Fails when the server has too many.
    pub fn long_lived(&self) -> Result<LongLivedPlace, TooManyStreams> {
        Arc::clone(&self.long_lived).try_acquire_owned().map(LongLivedPlace).map_err(|_none_left| {
            self.counters.streams_full.inc();
            TooManyStreams
        })
    }

    /// Event streams and long polls of all addresses now.
    #[must_use]
    pub fn long_lived_count(&self) -> usize {
        self.max_streams.saturating_sub(self.long_lived.available_permits())
    }
}

impl Streams {
    fn place(&self, address: IpAddr) -> Result<AddressPlace, TooMany> {
        let mut counts = self.open.lock();
        let count = counts.entry(address).or_insert(0);
        if *count >= self.max {
            return Err(TooMany(Duration::from_secs(1)));
        }
        *count += 1;
        Ok(AddressPlace { address, open: Arc::clone(&self.open) })
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut counts = self.open.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// A hop as proxies write it: an address, some with a port.
fn parse_hop(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let address = text.parse().or_else(|_| text.parse::<std::net::SocketAddr>().map(|socket| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// Whom an address stands for.
fn caller(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The same as text, without the half of an IPv6 address that does not matter: short enough to be stored in place.
fn key(address: IpAddr) -> String {
    match caller(address) {
        IpAddr::V6(address) => format!("{:016x}", address.to_bits() >> 64),
        IpAddr::V4(address) => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use weir_core::ManualClock;
    use weir_core::tier::TokenBucket;
    use weir_limiter::KeyThrottle;

    use super::*;

    fn limits(per_second: u32, streams: u32, trusted: &[&str]) -> AddressLimits {
        let clock = Arc::new(ManualClock::at(weir_core::Timestamp::EPOCH));
        let bucket = TokenBucket::new(1, per_second, Duration::from_secs(1)).ok();
        let requests =
            bucket.map(|bucket| Arc::new(KeyThrottle::new(bucket, 100, clock)) as Arc<dyn Throttle>);
        let settings = EdgeSettings {
            per_ip_per_second: per_second,
            per_ip_burst: 0,
            sse_per_ip: streams,
            trusted_proxies: trusted.iter().map(|text| Network::parse(text).unwrap()).collect(),
        };
        AddressLimits::new(&settings, requests, 100, AddressCounters::default())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn seen(limits: &AddressLimits, peer: &str, forwarded: &[&str]) -> String {
        let value = |text: &&str| (FORWARDED_FOR.parse().unwrap(), text.parse().unwrap());
        let headers: HeaderMap = forwarded.iter().map(value).collect();
        limits.address(ip(peer), &headers).to_string()
    }

    #[test]
    fn only_trusted_proxies_say_for_whom_they_ask() {
        let limits = limits(1, 1, &["10.0.0.0/8"]);
        assert_eq!(seen(&limits, "1.2.3.4", &["5.6.7.8"]), "1.2.3.4", "anybody can write a header");
        assert_eq!(seen(&limits, "10.0.0.1", &["5.6.7.8"]), "5.6.7.8");
        assert_eq!(
            seen(&limits, "10.0.0.1", &["9.9.9.9, 5.6.7.8, 10.0.0.2"]),
            "5.6.7.8",
            "the last untrusted"
        );
        assert_eq!(seen(&limits, "10.0.0.1", &["9.9.9.9", "5.6.7.8:1234"]), "5.6.7.8", "the last header");
        assert_eq!(seen(&limits, "10.0.0.1", &["5.6.7.8, nonsense"]), "10.0.0.1");
        assert_eq!(seen(&limits, "10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(seen(&limits, "::ffff:10.0.0.1", &["[2001:db8::1]:80"]), "2001:db8::1");
    }

    #[test]
    fn an_address_has_its_own_bucket_and_a_whole_64_shares_one() {
        let limits = limits(1, 0, &[]);
        assert_eq!(limits.request(ip("1.1.1.1")), Ok(()));
        assert!(limits.request(ip("1.1.1.1")).is_err());
        assert!(limits.request(ip("::ffff:1.1.1.1")).is_err(), "the same address");
        assert_eq!(limits.request(ip("1.1.1.2")), Ok(()));
        assert_eq!(limits.request(ip("2001:db8::1")), Ok(()));
        assert!(limits.request(ip("2001:db8::2")).is_err());
        assert_eq!(limits.request(ip("2001:db8:0:1::1")), Ok(()));
        let streams: Vec<_> = (0..50).map(|_| limits.stream(ip("1.1.1.1"))).collect();
        assert!(streams.iter().all(Result::is_ok), "streams are not limited");
    }

    #[test]
    fn a_place_is_free_again_when_its_stream_ends() {
        let limits = limits(0, 2, &[]);
        let (one, _two) = (limits.stream(ip("1.1.1.1")).unwrap(), limits.stream(ip("1.1.1.1")).unwrap());
        assert!(limits.stream(ip("1.1.1.1")).is_err());
        assert!(limits.stream(ip("1.1.1.2")).is_ok());
        drop(one);
        assert!(limits.stream(ip("1.1.1.1")).is_ok());
        assert!((0..100).all(|_| limits.request(ip("1.1.1.1")).is_ok()), "requests are not limited");
    }

    #[test]
    fn streams_and_long_polls_of_all_addresses_share_so_many_places() {
        let limits =
            AddressLimits { long_lived: Arc::new(Semaphore::new(2)), max_streams: 2, ..limits(0, 2, &[]) };
        let (one, poll) = (limits.stream(ip("1.1.1.1")).unwrap(), limits.long_lived().unwrap());
        let refused = StreamRefusal::OfServer(TooManyStreams);
        assert_eq!(limits.stream(ip("1.1.1.2")).unwrap_err(), refused);
        assert_eq!(limits.long_lived().unwrap_err(), TooManyStreams);
        assert_eq!(limits.long_lived_count(), 2);
        drop(poll);
        let two = limits.stream(ip("1.1.1.1")).unwrap();
        drop((one, two));
        let again = (limits.stream(ip("1.1.1.1")), limits.stream(ip("1.1.1.1")));
        assert!(again.0.is_ok() && again.1.is_ok(), "a refused stream takes no place of its address");
    }
}
