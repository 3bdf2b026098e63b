//! A real Apache Kafka for tests: one node that is broker and controller.
//!
//! [`Broker::shared`] is one broker for all tests of a process and cannot be stopped; each test uses its own topics, which
//! are created on first use. A test that stops, crashes or pauses Kafka uses a [`Broker::private`] one. `find` locates or
//! installs Kafka, `config` writes its configuration, and `protocol` checks whether a broker is ready.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::discover::EngineSource;
use crate::instance::{Handle, Instance, run_blocking, with_unused_port};
use crate::proxy::Proxy;

mod class_archive;
mod config;
mod find;
mod protocol;
pub mod secure;

const NAME: &str = "Kafka";

/// A second listener for clients behind a proxy: Kafka makes clients reconnect to the address that a listener advertises,
/// which here is the proxy's.
#[derive(Debug, Clone, Copy)]
struct ProxyListener {
    listen: SocketAddr,
    advertise: SocketAddr,
}

/// The command of a broker with the variables of Kafka's image, and storage in the directory that they name.
pub(crate) fn command(
    environment: &BTreeMap<String, String>,
    directory: &Path,
) -> Result<(PathBuf, Vec<String>), String> {
    match find::source()? {
        EngineSource::Local(kafka) => config::image_command(kafka, environment, directory),
        EngineSource::Docker => Err("Kafka's jars cannot be fetched: install Java 17 and Maven".to_owned()),
    }
}

/// Whether a broker serves requests. The error says why not.
pub(crate) fn answers(address: SocketAddr) -> Result<(), String> {
    protocol::probe(address)
}

/// A running Kafka. It is stopped and its files are removed when this value is dropped or the test process ends.
pub struct Broker {
    /// `host:port`, separated by commas.
    addresses: String,
    address: SocketAddr,
    /// `None` for a broker from `WEIR_TEST_KAFKA`, which cannot be stopped.
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

    /// A broker for one test, which may stop, crash or pause it. Blocks until it is ready.
    pub fn private() -> Self {
        with_unused_port(NAME, |port| Self::create(port, None))
    }

    /// [`private`](Self::private), and it also listens at `listens` and tells clients from there to stay with
    /// `advertises`: the two sides of a proxy.
    pub fn private_behind(listen: SocketAddr, advertise: SocketAddr) -> Self {
        with_unused_port(NAME, |port| Self::create(port, Some(ProxyListener { listen, advertise })))
    }

    /// A broker for one test and a proxy in front of it. Clients that connect to [`url_via`](Self::url_via) the proxy always
    /// use it; those that connect to [`url`](Self::url) never do.
    pub async fn private_with_proxy() -> (Self, Proxy) {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, crate::ports::unused()));
        let proxy = Proxy::start(listen).await;
        let advertise = proxy.addr();
        (run_blocking(move || Self::private_behind(listen, advertise)).await, proxy)
    }

    fn create(port: u16, proxied: Option<ProxyListener>) -> Result<Self, String> {
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

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub async fn topics(&self) -> Vec<String> {
        let address = self.address;
        let metadata = run_blocking(move || protocol::metadata(address, None)).await;
        metadata.unwrap_or_else(|error| panic!("{NAME} does not list its topics: {error}")).topics
    }

    /// The broker's log so far, warnings and errors; empty for `WEIR_TEST_KAFKA`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Stops the broker in an orderly way and keeps its port reserved.
    pub async fn stop(&mut self) {
        self.own_instance().stop().await;
    }

    /// Starts a stopped or crashed broker on the same port with its data and waits until it is ready.
    pub async fn start(&mut self) {
        let address = self.address;
        self.own_instance().start(move || protocol::probe(address)).await;
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// Kills the process with SIGKILL, like a power cut except for the disk's cache.
    pub fn crash(&mut self) {
        self.own_instance().lock().crash();
    }

    /// Freezes the broker: the kernel still accepts connections, but nothing responds.
    pub fn pause(&mut self) {
        self.own_instance().lock().pause();
    }

    pub fn resume(&mut self) {
        self.own_instance().lock().resume();
    }

    fn own_instance(&self) -> &Handle<dyn Instance> {
        self.instance.as_ref().expect("only shared() returns an external broker, and never mutably")
    }
}

#[cfg(test)]
mod tests;
