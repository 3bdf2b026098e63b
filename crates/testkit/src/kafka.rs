//! A real Apache Kafka for tests: one node that is broker and controller.
//!
//! [`Broker::shared`] is one broker for all tests of a process and cannot be disturbed; each test keeps to topics of
//! its own, which come into being on first use. A test that stops, crashes or pauses Kafka takes a
//! [`Broker::private`] one. Where it comes from is decided in `find`; `config` says how it is run and `protocol`
//! asks whether it is there.

use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::OnceLock;

use crate::instance::{Handle, Instance, on_an_unused_port, unblocked};
use crate::proxy::Proxy;

mod archive;
mod config;
mod find;
mod protocol;

const NAME: &str = "Kafka";

/// A second door: Kafka tells clients to come back to an address of its own choosing, so whoever is to stay behind
/// a proxy must enter where that proxy's address is the one told.
#[derive(Debug, Clone, Copy)]
struct Proxied {
    listens: SocketAddr,
    advertises: SocketAddr,
}

/// A running Kafka. It ends, and its files go, with this value or with the test process.
pub struct Broker {
    /// `host:port`, separated by commas.
    addresses: String,
    address: SocketAddr,
    /// None when the broker was given by `WEIR_TEST_KAFKA` and so is not ours to command.
    instance: Option<Handle<dyn Instance>>,
}

impl Broker {
    /// The broker that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Broker> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_KAFKA") {
            Ok(addresses) => Self::external(&addresses),
            Err(_) => Self::private(),
        })
    }

    /// A broker of one's own, to be stopped, crashed or paused at will. Blocks until it is ready.
    pub fn private() -> Self {
        on_an_unused_port(NAME, |port| Self::create(port, None))
    }

    /// [`private`](Self::private), and it also listens at `listens` and tells clients from there to stay with
    /// `advertises`: the two sides of a proxy.
    pub fn private_behind(listens: SocketAddr, advertises: SocketAddr) -> Self {
        on_an_unused_port(NAME, |port| Self::create(port, Some(Proxied { listens, advertises })))
    }

    /// A broker of one's own and a proxy before it. Clients that enter by [`url_via`](Self::url_via) the proxy stay
    /// behind it; those that enter by [`url`](Self::url) never meet it.
    pub async fn private_with_proxy() -> (Self, Proxy) {
        let listens = SocketAddr::from((Ipv4Addr::LOCALHOST, crate::ports::unused()));
        let proxy = Proxy::start(listens).await;
        let advertises = proxy.addr();
        (unblocked(move || Self::private_behind(listens, advertises)).await, proxy)
    }

    fn create(port: u16, proxied: Option<Proxied>) -> Result<Self, String> {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        let instance = Handle::new(NAME, config::instance(source, port, proxied));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        instance.lock().launch();
        instance.wait_ready(|| protocol::probe(address))?;
        Ok(Self { addresses: address.to_string(), address, instance: Some(instance) })
    }

    fn external(addresses: &str) -> Self {
        let addresses: Vec<&str> = addresses.split(',').map(str::trim).collect();
        let first = addresses[0];
        let mut found = first.to_socket_addrs().unwrap_or_else(|error| {
            panic!("WEIR_TEST_KAFKA must be host:port, or several with commas between; {first}: {error}")
        });
        let address = found.next().unwrap_or_else(|| panic!("{first} in WEIR_TEST_KAFKA has no address"));
        if let Err(reason) = protocol::probe(address) {
            panic!("the broker of WEIR_TEST_KAFKA does not answer: {reason}; start it or unset the variable");
        }
        Self { addresses: addresses.join(","), address, instance: None }
    }

    /// `kafka://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("kafka://{}", self.addresses)
    }

    /// The same broker through a proxy at `addr`; see [`private_with_proxy`](Self::private_with_proxy).
    pub fn url_via(&self, addr: SocketAddr) -> String {
        format!("kafka://{addr}")
    }

    /// Where the broker listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The names of all topics.
    pub async fn topics(&self) -> Vec<String> {
        let address = self.address;
        let metadata = unblocked(move || protocol::metadata(address, None)).await;
        metadata.unwrap_or_else(|error| panic!("{NAME} does not list its topics: {error}")).topics
    }

    /// What the broker has logged so far, warnings and worse; empty for `WEIR_TEST_KAFKA`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Ends the broker in an orderly way. Its port stays its own.
    pub async fn stop(&mut self) {
        self.commanded().stop().await;
    }

    /// Starts a stopped or crashed broker on the same port, with what it had stored, and waits until it is ready.
    pub async fn start(&mut self) {
        let address = self.address;
        self.commanded().start(move || protocol::probe(address)).await;
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// SIGKILL: what a power cut leaves, apart from the disk's own cache.
    pub fn crash(&mut self) {
        self.commanded().lock().crash();
    }

    /// Freezes the broker: it accepts connections (the kernel does) and answers nothing.
    pub fn pause(&mut self) {
        self.commanded().lock().pause();
    }

    pub fn resume(&mut self) {
        self.commanded().lock().resume();
    }

    fn commanded(&self) -> &Handle<dyn Instance> {
        self.instance.as_ref().expect("only shared() gives a broker that is not ours, and never mutably")
    }
}

#[cfg(test)]
mod tests;
