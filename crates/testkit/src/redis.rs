//! A real Redis for tests, alone or as a cluster of three.
//!
//! [`Server::shared`] is one server for all tests of a process and cannot be disturbed; each test keeps to keys of
//! its own. A test that stops, crashes, pauses or empties Redis takes a [`Server::private`] one. Where the server
//! comes from is decided in `find`; `config` says how it is run and `connection` speaks to it.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::OnceLock;

use url::Url;

use crate::instance::{Erasable, Handle, on_an_unused_port, unblocked};
use connection::Endpoint;

pub use cluster::Cluster;
pub use connection::Reply;

mod cluster;
mod config;
mod connection;
mod find;

const NAME: &str = "Redis";

/// How to start a server of one's own.
#[derive(Debug, Clone)]
pub struct Options {
    pub password: Option<String>,
    /// Serve TLS, and nothing else, with a certificate for `localhost`.
    pub tls: bool,
    /// Write every command to disk before it is answered: what was acknowledged survives a crash. Without this a
    /// server comes back empty, also from an orderly stop.
    pub appendonly: bool,
    /// `redis.conf` lines as name and the rest, after all others.
    pub settings: Vec<(String, String)>,
    /// Variables of its environment, where it is started from local binaries.
    pub environment: Vec<(OsString, OsString)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { password: None, tls: false, appendonly: true, settings: Vec::new(), environment: Vec::new() }
    }
}

/// A running Redis. It ends, and its files go, with this value or with the test process.
pub struct Server {
    url: Url,
    endpoint: Endpoint,
    /// None when the server was given by `WEIR_TEST_REDIS` and so is not ours to command.
    instance: Option<Handle<dyn Erasable>>,
}

impl Server {
    /// The server that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_REDIS") {
            Ok(url) => Self::external(&url),
            // Nothing it holds has to outlive a restart.
            Err(_) => Self::private(&Options { appendonly: false, ..Options::default() }),
        })
    }

    /// A server of one's own, to be stopped, crashed, paused or emptied at will. Blocks until it is ready.
    pub fn private(options: &Options) -> Self {
        on_an_unused_port(NAME, |port| Self::create(port, options, None))
    }

    fn create(port: u16, options: &Options, bus_port: Option<u16>) -> Result<Self, String> {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        let (instance, ca_file) = config::instance(source, port, options, bus_port);
        let endpoint = Endpoint {
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            ca_file,
            user: None,
            password: options.password.clone(),
            database: None,
        };
        let instance = Handle::new(NAME, instance);
        instance.lock().launch();
        instance.wait_ready(|| endpoint.probe())?;
        Ok(Self { url: url(port, options), endpoint, instance: Some(instance) })
    }

    fn external(url: &str) -> Self {
        let parsed = Url::parse(url).ok().filter(|url| url.scheme() == "redis");
        let url = parsed.expect("WEIR_TEST_REDIS must be redis://user:password@host:port/database");
        let endpoint = Endpoint::of(&url);
        if let Err(reason) = endpoint.probe() {
            panic!("the server of WEIR_TEST_REDIS does not answer: {reason}; start it or unset the variable");
        }
        Self { url, endpoint, instance: None }
    }

    /// `redis://:password@127.0.0.1:port`; with TLS `rediss://` and the host is `localhost`.
    pub fn url(&self) -> &str {
        self.url.as_str()
    }

    /// The same server through a proxy at `addr`.
    pub fn url_via(&self, addr: SocketAddr) -> String {
        let mut url = self.url.clone();
        // `localhost` stays, because the certificate is made out to it.
        if self.endpoint.ca_file.is_none() {
            // Not `set_ip_host`, which is for the schemes that browsers know.
            url.set_host(Some(&addr.ip().to_string())).expect("a redis URL takes an IP address as host");
        }
        url.set_port(Some(addr.port())).expect("a redis URL takes a port");
        url.into()
    }

    /// Where the server listens: the upstream for a [`Proxy`](crate::proxy::Proxy).
    pub fn address(&self) -> SocketAddr {
        self.endpoint.addr
    }

    /// The certificate authority (PEM) that signed the server's certificate; None without TLS.
    pub fn ca_file(&self) -> Option<&Path> {
        self.endpoint.ca_file.as_deref()
    }

    /// What the server has logged so far; empty for `WEIR_TEST_REDIS`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Runs one command in a connection of its own; panics with the server's words when it refuses.
    pub async fn command(&self, words: &[&str]) -> Reply {
        let reply = self.try_command(words).await;
        reply.unwrap_or_else(|reason| panic!("{reason}\nin command: {}", words.join(" ")))
    }

    /// [`command`](Self::command) for those who expect a refusal or no answer; `Err` is the server's words or why
    /// there are none.
    pub async fn try_command(&self, words: &[&str]) -> Result<Reply, String> {
        let endpoint = self.endpoint.clone();
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        unblocked(move || endpoint.run(&words)).await
    }

    /// Ends the server in an orderly way. Its port stays its own.
    pub async fn stop(&mut self) {
        self.commanded().stop().await;
    }

    /// Starts a stopped or crashed server on the same port and waits until it is ready.
    pub async fn start(&mut self) {
        let endpoint = self.endpoint.clone();
        self.commanded().start(move || endpoint.probe()).await;
    }

    /// What was stored is there again, unless [`Options::appendonly`] is off.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// [`start`](Self::start), its files removed: what it stored and, of a cluster's node, who it was are gone.
    pub async fn start_empty(&mut self) {
        self.commanded().lock().erase();
        self.start().await;
    }

    pub async fn restart_empty(&mut self) {
        self.stop().await;
        self.start_empty().await;
    }

    /// SIGKILL: what a power cut leaves, apart from the disk's own cache.
    pub fn crash(&mut self) {
        self.commanded().lock().crash();
    }

    /// Freezes the server: it accepts connections (the kernel does) and answers nothing.
    pub fn pause(&mut self) {
        self.commanded().lock().pause();
    }

    pub fn resume(&mut self) {
        self.commanded().lock().resume();
    }

    fn commanded(&self) -> &Handle<dyn Erasable> {
        self.instance.as_ref().expect("only shared() gives a server that is not ours, and never mutably")
    }
}

fn url(port: u16, options: &Options) -> Url {
    let address = if options.tls { "rediss://localhost" } else { "redis://127.0.0.1" };
    let mut url = Url::parse(&format!("{address}:{port}")).expect("a valid URL");
    // `set_password` encodes `@` and `/` but takes a `%` as already encoded.
    let password = options.password.as_ref().map(|password| password.replace('%', "%25"));
    url.set_password(password.as_deref()).expect("a URL with a host takes a password");
    url
}

/// The first address of `host`; panics naming the variable that it came from.
fn resolve(url: &Url) -> SocketAddr {
    let host = url.host_str().expect("WEIR_TEST_REDIS must name a host");
    let mut found = (host.trim_matches(['[', ']']), url.port().unwrap_or(6379))
        .to_socket_addrs()
        .unwrap_or_else(|error| panic!("cannot resolve {host} in WEIR_TEST_REDIS: {error}"));
    found.next().unwrap_or_else(|| panic!("{host} in WEIR_TEST_REDIS has no address"))
}

#[cfg(test)]
mod tests;
