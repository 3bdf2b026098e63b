//! Limits per client address: requests per second and open event streams. Also the limit on event streams and long polls of
//! all addresses, which last long and must leave connections to other callers.
//!
//! Servers on one Redis count requests together: each asks only about those that its own memory lets pass, and while Redis does
//! not answer that memory alone decides. Streams are counted by each server.
//!
//! The address is that of the connection or, behind a trusted proxy, the one that the proxy names. IPv6 addresses are limited
//! per /64 network, because whoever has one address of it has all of them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_store::throttle::{AddressLimit, Throttle};
use weir_store_redis::RedisAttempts;

use crate::settings::edge::{EdgeSettings, KnownNetworks, Network};

const FORWARDED_FOR: &str = "x-forwarded-for";

#[derive(Debug)]
pub struct AddressLimits {
    requests: Option<Arc<dyn Throttle>>,
    /// The limit of each address in `requests`, per second and at once.
    limit: (u32, u32),
    /// Counts requests together with other servers.
    together: Option<RedisAttempts>,
    /// Refuses nothing: its refusals are counted, for alerts.
    fast_requests: Option<Arc<dyn Throttle>>,
    streams: StreamCounts,
    /// The most streams of an address; 0 is no limit.
    streams_max: u32,
    /// Limits of addresses in known networks, by network.
    known: Vec<(Network, KnownLimits)>,
    /// Permits for event streams and long polls of all addresses.
    long_lived: Arc<Semaphore>,
    max_streams: usize,
    trusted_proxies: Vec<Network>,
    counters: AddressCounters,
}

/// The limits of an address in a known network.
#[derive(Clone, Debug)]
struct KnownLimits {
    requests: Option<Arc<dyn Throttle>>,
    /// The limit of each address in `requests`, per second and at once.
    limit: (u32, u32),
    streams_max: u32,
}

#[derive(Debug, Default)]
pub struct AddressCounters {
    /// Requests and streams refused because of the limits of their address.
    pub limited: Counter,
    /// Requests of an address beyond the rate that operators are alerted about.
    pub fast: Counter,
    /// Streams and long polls refused because the server has too many.
    pub streams_full: Counter,
}

/// The open event streams of each address.
#[derive(Debug, Default)]
struct StreamCounts {
    open: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// The permits of an open event stream.
#[derive(Debug)]
pub struct StreamPermit {
    _address: Option<AddressPermit>,
    _server: LongLivedPermit,
}

/// The permit of a stream among those of its address.
#[derive(Debug)]
struct AddressPermit {
    address: IpAddr,
    open: Arc<Mutex<HashMap<IpAddr, u32>>>,
}

/// The permit of a stream or long poll among those of all addresses.
#[derive(Debug)]
pub struct LongLivedPermit(#[expect(dead_code, reason = "held, not read")] OwnedSemaphorePermit);

/// The address is over one of its limits. Holds the time to wait before the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressOverLimit(pub Duration);

/// The server has as many event streams and long polls as it may have (`http.max_streams`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyStreams;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRefusal {
    Address(AddressOverLimit),
    Server(TooManyStreams),
}

impl AddressLimits {
    /// `requests` is the throttle of requests; `None` if they are not limited. What `fast_requests` refuses is only counted.
    /// Without `together` each server counts for itself.
    #[must_use]
    pub fn new(
        settings: &EdgeSettings,
        requests: Option<Arc<dyn Throttle>>,
        fast_requests: Option<Arc<dyn Throttle>>,
        together: Option<RedisAttempts>,
        max_streams: usize,
        counters: AddressCounters,
    ) -> Self {
        let EdgeSettings { per_ip_per_second, sse_per_ip, trusted_proxies, .. } = settings;
        Self {
            requests,
            limit: (*per_ip_per_second, settings.burst()),
            together,
            fast_requests,
            streams: StreamCounts::default(),
            streams_max: *sse_per_ip,
            known: Vec::new(),
            long_lived: Arc::new(Semaphore::new(max_streams)),
            max_streams,
            trusted_proxies: trusted_proxies.clone(),
            counters,
        }
    }

    /// Adds the limits of known networks. `throttle` makes a throttle of requests per second and at once.
    #[must_use]
    pub fn with_known_networks(
        mut self,
        settings: &[KnownNetworks],
        throttle: impl Fn(u32, u32) -> Option<Arc<dyn Throttle>>,
    ) -> Self {
        for known in settings {
            let limit = (known.per_ip_per_second, known.per_ip_burst.saturating_add(1));
            let limits =
                KnownLimits { requests: throttle(limit.0, limit.1), limit, streams_max: known.sse_per_ip };
            self.known.extend(known.networks.iter().map(|network| (*network, limits.clone())));
        }
        self
    }

    /// Returns the limits of the smallest known network that an address is in.
    fn known(&self, address: IpAddr) -> Option<&KnownLimits> {
        let around = self.known.iter().filter(|(network, _)| network.contains(address));
        around.max_by_key(|(network, _)| network.prefix()).map(|(_, limits)| limits)
    }

    /// Returns the throttle of an address, and its limit per second and at once.
    fn limit_of(&self, address: IpAddr) -> (Option<&dyn Throttle>, (u32, u32)) {
        let of_all = (&self.requests, self.limit);
        let (requests, limit) = self.known(address).map_or(of_all, |known| (&known.requests, known.limit));
        (requests.as_deref(), limit)
    }

    /// Returns the address of the client: the last hop that is not a trusted proxy.
    #[must_use]
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let is_trusted =
            |address: &IpAddr| self.trusted_proxies.iter().any(|network| network.contains(*address));
        let peer = peer.to_canonical();
        if !is_trusted(&peer) {
            return peer;
        }
        let values = headers.get_all(FORWARDED_FOR).iter().rev();
        let hops = values.flat_map(|value| value.to_str().unwrap_or_default().rsplit(','));
        let mut nearest = peer;
        for hop in hops {
            // A trusted proxy writes addresses only, so this was written by someone before it.
            let Some(address) = parse_hop(hop) else { return nearest };
            nearest = address;
            if !is_trusted(&address) {
                break;
            }
        }
        nearest
    }

    /// Counts a request of an address: here and, if that lets it pass, on all servers together. Where the store counts an attempt
    /// to buy when it decides it, returns the limit by which it is to be counted.
    /// Fails when the address makes too many requests.
    pub async fn admit(
        &self,
        address: IpAddr,
        is_attempt: bool,
    ) -> Result<Option<AddressLimit>, AddressOverLimit> {
        let (requests, (per_second, burst)) = self.limit_of(address);
        self.take_request(address)?;
        let Some(together) = self.together.as_ref().filter(|_| requests.is_some()) else {
            return Ok(None);
        };
        let limit = AddressLimit { address: throttle_key(address).into(), per_second, burst };
        if is_attempt && together.counts_purchases() {
            return Ok(Some(limit));
        }
        match together.count_address(&limit).await {
            None => Ok(None),
            Some(wait) => {
                self.counters.limited.inc();
                Err(AddressOverLimit(wait))
            }
        }
    }

    /// Counts a request of an address on this server.
    /// Fails when the address makes too many requests.
    fn take_request(&self, address: IpAddr) -> Result<(), AddressOverLimit> {
        let key = throttle_key(address);
        if self.fast_requests.as_ref().is_some_and(|fast| !fast.take(&key).is_allowed) {
            self.counters.fast.inc();
        }
        let (Some(requests), _) = self.limit_of(address) else { return Ok(()) };
        let throttled = requests.take(&key);
        if throttled.is_allowed {
            return Ok(());
        }
        self.counters.limited.inc();
        Err(AddressOverLimit(throttled.limit_state.next_after))
    }

    /// Returns a permit for an event stream.
    /// Fails when the address or the server has too many open.
    pub fn acquire_stream(&self, address: IpAddr) -> Result<StreamPermit, StreamRefusal> {
        let max = self.known(address).map_or(self.streams_max, |known| known.streams_max);
        let permit = (max > 0).then(|| self.streams.acquire(network(address), max)).transpose();
        let permit = permit.map_err(|refusal| {
            self.counters.limited.inc();
            StreamRefusal::Address(refusal)
        })?;
        let of_server = self.acquire_long_lived().map_err(StreamRefusal::Server)?;
        Ok(StreamPermit { _address: permit, _server: of_server })
    }

    /// Returns a permit for a long poll, or for a stream that is not limited by its address.
    /// Fails when the server has too many open.
    pub fn acquire_long_lived(&self) -> Result<LongLivedPermit, TooManyStreams> {
        Arc::clone(&self.long_lived).try_acquire_owned().map(LongLivedPermit).map_err(|_none_left| {
            self.counters.streams_full.inc();
            TooManyStreams
        })
    }

    /// The open event streams and long polls of all addresses.
    #[must_use]
    pub fn long_lived_count(&self) -> usize {
        self.max_streams.saturating_sub(self.long_lived.available_permits())
    }
}

impl StreamCounts {
    fn acquire(&self, address: IpAddr, max: u32) -> Result<AddressPermit, AddressOverLimit> {
        let mut counts = self.open.lock();
        let count = counts.entry(address).or_insert(0);
        if *count >= max {
            return Err(AddressOverLimit(Duration::from_secs(1)));
        }
        *count += 1;
        Ok(AddressPermit { address, open: Arc::clone(&self.open) })
    }
}

impl Drop for AddressPermit {
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

/// Parses a hop as proxies write it: an address, with or without a port.
fn parse_hop(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let address = text.parse().or_else(|_| text.parse::<std::net::SocketAddr>().map(|socket| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// Returns the network whose addresses count as one: the /64 of an IPv6 address, an IPv4 address itself.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// Returns the network as text, without the zero half of an IPv6 address: short enough to be stored in place.
fn throttle_key(address: IpAddr) -> String {
    match network(address) {
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
            networks: Vec::new(),
        };
        AddressLimits::new(&settings, requests, None, None, 100, AddressCounters::default())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn client(limits: &AddressLimits, peer: &str, forwarded: &[&str]) -> String {
        let value = |text: &&str| (FORWARDED_FOR.parse().unwrap(), text.parse().unwrap());
        let headers: HeaderMap = forwarded.iter().map(value).collect();
        limits.client_address(ip(peer), &headers).to_string()
    }

    #[test]
    fn only_trusted_proxies_may_name_the_client() {
        let limits = limits(1, 1, &["10.0.0.0/8"]);
        assert_eq!(client(&limits, "1.2.3.4", &["5.6.7.8"]), "1.2.3.4", "anybody can write a header");
        assert_eq!(client(&limits, "10.0.0.1", &["5.6.7.8"]), "5.6.7.8");
        assert_eq!(
            client(&limits, "10.0.0.1", &["9.9.9.9, 5.6.7.8, 10.0.0.2"]),
            "5.6.7.8",
            "the last untrusted"
        );
        assert_eq!(client(&limits, "10.0.0.1", &["9.9.9.9", "5.6.7.8:1234"]), "5.6.7.8", "the last header");
        assert_eq!(client(&limits, "10.0.0.1", &["5.6.7.8, nonsense"]), "10.0.0.1");
        assert_eq!(client(&limits, "10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(client(&limits, "::ffff:10.0.0.1", &["[2001:db8::1]:80"]), "2001:db8::1");
    }

    #[test]
    fn an_ipv4_address_has_its_own_bucket_and_an_ipv6_64_shares_one() {
        let limits = limits(1, 0, &[]);
        assert_eq!(limits.take_request(ip("1.1.1.1")), Ok(()));
        assert!(limits.take_request(ip("1.1.1.1")).is_err());
        assert!(limits.take_request(ip("::ffff:1.1.1.1")).is_err(), "the same address");
        assert_eq!(limits.take_request(ip("1.1.1.2")), Ok(()));
        assert_eq!(limits.take_request(ip("2001:db8::1")), Ok(()));
        assert!(limits.take_request(ip("2001:db8::2")).is_err());
        assert_eq!(limits.take_request(ip("2001:db8:0:1::1")), Ok(()));
        let streams: Vec<_> = (0..50).map(|_| limits.acquire_stream(ip("1.1.1.1"))).collect();
        assert!(streams.iter().all(Result::is_ok), "streams are not limited");
    }

    #[test]
    fn addresses_of_known_networks_have_limits_of_their_own() {
        let clock = Arc::new(ManualClock::at(weir_core::Timestamp::EPOCH));
        let throttle = |per_second, burst| {
            let bucket = TokenBucket::new(burst, per_second, Duration::from_secs(1)).ok()?;
            Some(Arc::new(KeyThrottle::new(bucket, 100, Arc::<ManualClock>::clone(&clock)))
                as Arc<dyn Throttle>)
        };
        let known = |network: &str, per_ip_per_second, sse_per_ip| KnownNetworks {
            networks: vec![Network::parse(network).unwrap()],
            per_ip_per_second,
            per_ip_burst: 2,
            sse_per_ip,
        };
        let networks = [known("10.0.0.0/8", 3, 2), known("10.1.0.0/16", 0, 0)];
        let limits = limits(1, 1, &[]).with_known_networks(&networks, throttle);
        let requests = |address| (0..9).filter(|_| limits.take_request(ip(address)).is_ok()).count();
        assert_eq!([requests("1.1.1.1"), requests("10.2.0.1"), requests("10.2.0.2")], [1, 3, 3]);
        assert_eq!(requests("10.1.0.1"), 9, "the smaller network says that there is no limit");
        let streams = |address: &str| {
            let permits: Vec<_> = (0..5).map(|_| limits.acquire_stream(ip(address))).collect();
            permits.iter().filter(|permit| permit.is_ok()).count()
        };
        assert_eq!(["1.1.1.1", "10.2.0.1", "10.1.0.1"].map(streams), [1, 2, 5]);
    }

    #[test]
    fn calls_beyond_the_fast_rate_are_counted_and_not_refused() {
        let clock = Arc::new(ManualClock::at(weir_core::Timestamp::EPOCH));
        let bucket = TokenBucket::new(5, 5, Duration::from_secs(1)).unwrap();
        let fast_requests = Some(Arc::new(KeyThrottle::new(bucket, 100, clock)) as Arc<dyn Throttle>);
        let limits = AddressLimits { fast_requests, ..limits(0, 0, &[]) };
        assert!((0..7).all(|_| limits.take_request(ip("1.1.1.1")).is_ok()));
        assert!(limits.take_request(ip("1.1.1.2")).is_ok());
        assert_eq!(limits.counters.fast.get(), 2);
    }

    #[test]
    fn a_permit_is_released_when_its_stream_ends() {
        let limits = limits(0, 2, &[]);
        let (one, _two) =
            (limits.acquire_stream(ip("1.1.1.1")).unwrap(), limits.acquire_stream(ip("1.1.1.1")).unwrap());
        assert!(limits.acquire_stream(ip("1.1.1.1")).is_err());
        assert!(limits.acquire_stream(ip("1.1.1.2")).is_ok());
        drop(one);
        assert!(limits.acquire_stream(ip("1.1.1.1")).is_ok());
        assert!((0..100).all(|_| limits.take_request(ip("1.1.1.1")).is_ok()), "requests are not limited");
    }

    #[test]
    fn streams_and_long_polls_of_all_addresses_share_a_number_of_permits() {
        let limits =
            AddressLimits { long_lived: Arc::new(Semaphore::new(2)), max_streams: 2, ..limits(0, 2, &[]) };
        let (one, poll) =
            (limits.acquire_stream(ip("1.1.1.1")).unwrap(), limits.acquire_long_lived().unwrap());
        let refused = StreamRefusal::Server(TooManyStreams);
        assert_eq!(limits.acquire_stream(ip("1.1.1.2")).unwrap_err(), refused);
        assert_eq!(limits.acquire_long_lived().unwrap_err(), TooManyStreams);
        assert_eq!(limits.long_lived_count(), 2);
        drop(poll);
        let two = limits.acquire_stream(ip("1.1.1.1")).unwrap();
        drop((one, two));
        let again = (limits.acquire_stream(ip("1.1.1.1")), limits.acquire_stream(ip("1.1.1.1")));
        assert!(again.0.is_ok() && again.1.is_ok(), "a refused stream takes no permit of its address");
    }
}
