//! A real Redis for tests, standalone or as a cluster of three.
//!
//! [`Server::shared`] is one server for all tests of a process and cannot be stopped; each test uses its own keys. A test
//! that stops, crashes, pauses or empties Redis uses a [`Server::private`] one. `find` locates or installs the server,
//! `config` writes its configuration, and `connection` sends commands.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use url::Url;

use crate::discover::EngineSource;
use crate::instance::{Erasable, Handle, run_blocking, with_unused_port};
use connection::Endpoint;

pub use cluster::Cluster;
pub use connection::Reply;

mod cluster;
mod config;
mod connection;
mod find;

const NAME: &str = "Redis";

/// The program `redis-server`, installed if needed.
pub(crate) fn program() -> Result<PathBuf, String> {
    match find::source()? {
        EngineSource::Local(program) => Ok(program.clone()),
        EngineSource::Docker => {
            Err("Redis is not installed and cannot be: install Debian's redis-server".to_owned())
        }
    }
}

/// How to start a private server.
#[derive(Debug, Clone)]
pub struct Options {
    pub password: Option<String>,
    /// Accept only TLS, with a certificate for `localhost`.
    pub tls: bool,
    /// Write every command to disk before replying, so that acknowledged writes survive a crash. Otherwise a server is empty
    /// after a restart, also after an orderly stop.
    pub appendonly: bool,
    /// Additional lines of `redis.conf` as name and value, after all others.
    pub settings: Vec<(String, String)>,
    /// Environment variables, if it is started from local binaries.
    pub environment: Vec<(OsString, OsString)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { password: None, tls: false, appendonly: true, settings: Vec::new(), environment: Vec::new() }
    }
}

/// A running Redis. It is stopped and its files are removed when this value is dropped or the test process ends.
pub struct Server {
    url: Url,
    endpoint: Endpoint,
    /// `None` for a server from `WEIR_TEST_REDIS`, which cannot be stopped.
    instance: Option<Handle<dyn Erasable>>,
}

impl Server {
    /// The server that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_REDIS") {
            Ok(url) => Self::external(&url),
            // Its data need not survive a restart.
            Err(_) => Self::private(&Options { appendonly: false, ..Options::default() }),
        })
    }

    /// A server for one test, which may stop, crash, pause or empty it. Blocks until it is ready.
    pub fn private(options: &Options) -> Self {
        with_unused_port(NAME, |port| Self::create(port, options, None))
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
        let endpoint = Endpoint::from_url(&url);
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
            // Not `set_ip_host`, which supports only the schemes of browsers.
            url.set_host(Some(&addr.ip().to_string())).expect("a redis URL takes an IP address as host");
        }
        url.set_port(Some(addr.port())).expect("a redis URL takes a port");
        url.into()
    }

    /// The address of the server, such as the upstream of a [`Proxy`](crate::proxy::Proxy).
    pub fn address(&self) -> SocketAddr {
        self.endpoint.addr
    }

    /// The certificate authority (PEM) that signed the server's certificate; `None` without TLS.
    pub fn ca_file(&self) -> Option<&Path> {
        self.endpoint.ca_file.as_deref()
    }

    /// The server's log so far; empty for `WEIR_TEST_REDIS`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Runs one command in a new connection; panics with the server's error.
    pub async fn command(&self, words: &[&str]) -> Reply {
        let reply = self.try_command(words).await;
        reply.unwrap_or_else(|reason| panic!("{reason}\nin command: {}", words.join(" ")))
    }

    /// Like [`command`](Self::command), but returns the server's error, or why there was no reply.
    pub async fn try_command(&self, words: &[&str]) -> Result<Reply, String> {
        let endpoint = self.endpoint.clone();
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        run_blocking(move || endpoint.run(&words)).await
    }

    /// Stops the server in an orderly way and keeps its port reserved.
    pub async fn stop(&mut self) {
        self.own_instance().stop().await;
    }

    /// Starts a stopped or crashed server on the same port and waits until it is ready.
    pub async fn start(&mut self) {
        let endpoint = self.endpoint.clone();
        self.own_instance().start(move || endpoint.probe()).await;
    }

    /// Restarts the server. Its data survives unless [`Options::appendonly`] is off.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// Removes the server's files, also the identity of a cluster's node, and [`start`](Self::start)s it.
    pub async fn start_empty(&mut self) {
        self.own_instance().lock().erase();
        self.start().await;
    }

    pub async fn restart_empty(&mut self) {
        self.stop().await;
        self.start_empty().await;
    }

    /// Kills the process with SIGKILL, like a power cut except for the disk's cache.
    pub fn crash(&mut self) {
        self.own_instance().lock().crash();
    }

    /// Freezes the server: the kernel still accepts connections, but nothing responds.
    pub fn pause(&mut self) {
        self.own_instance().lock().pause();
    }

    pub fn resume(&mut self) {
        self.own_instance().lock().resume();
    }

    fn own_instance(&self) -> &Handle<dyn Erasable> {
        self.instance.as_ref().expect("only shared() returns an external server, and never mutably")
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

/// The first address of the URL's host; the panic names the variable `WEIR_TEST_REDIS`.
fn resolve(url: &Url) -> SocketAddr {
    let host = url.host_str().expect("WEIR_TEST_REDIS must name a host");
    let mut found = (host.trim_matches(['[', ']']), url.port().unwrap_or(6379))
        .to_socket_addrs()
        .unwrap_or_else(|error| panic!("cannot resolve {host} in WEIR_TEST_REDIS: {error}"));
    found.next().unwrap_or_else(|| panic!("{host} in WEIR_TEST_REDIS has no address"))
}

#[cfg(test)]
mod tests;
