//! A real PostgreSQL for tests, and fresh databases in it.
//!
//! [`Server::shared`] is one cluster for all tests of a process and cannot be stopped; a test that stops, crashes or pauses
//! PostgreSQL uses a [`Server::private`] one. `find` locates or installs the server, `cluster` runs local binaries and
//! `docker` a container.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use url::Url;

use crate::clock::FakeClock;
use crate::discover::EngineSource;
use crate::instance::{Handle, Instance, with_unused_port};

pub use database::Database;
use database::{Cleanup, IdleDatabases};

mod cluster;
mod connection;
mod database;
mod docker;
mod find;
mod standby;

const SUPERUSER: &str = "postgres";

/// How to start a private server.
#[derive(Debug, Clone)]
pub struct Options {
    /// `postgresql.conf` settings, on top of PostgreSQL's own defaults.
    pub settings: Vec<(String, String)>,
    /// Accept only TLS, with a certificate for `localhost`.
    pub tls: bool,
    /// Store its files in memory if there is enough.
    pub in_memory: bool,
    /// Environment variables, if it is started from local binaries.
    pub environment: Vec<(OsString, OsString)>,
}

impl Default for Options {
    /// Settings for tests: durable as in production, many connections, fast detection of deadlocks.
    fn default() -> Self {
        let settings = [
            ("max_connections", "300"),
            ("fsync", "on"),
            ("shared_buffers", "128MB"),
            ("log_lock_waits", "on"),
            ("deadlock_timeout", "100ms"),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { settings, tls: false, in_memory: false, environment: Vec::new() }
    }
}

impl Options {
    /// The options of the shared server. Its tests create tens of thousands of tables, each with several files, which takes
    /// longer on disk than everything else. In memory a sync is free, so the durable settings can stay.
    fn fast() -> Self {
        let mut options = Self { in_memory: true, ..Self::default() };
        let small = [("max_wal_size", "128MB"), ("min_wal_size", "32MB")];
        options.settings.extend(small.map(|(name, value)| (name.to_owned(), value.to_owned())));
        options
    }
}

/// A running PostgreSQL. It is stopped and its files are removed when this value is dropped or the test process ends.
pub struct Server {
    /// The superuser's URL; its database is replaced for each [`Database`].
    url: Url,
    ca_file: Option<PathBuf>,
    bin_dir: Option<PathBuf>,
    /// `None` for a server from `WEIR_TEST_POSTGRES`, which cannot be stopped.
    instance: Option<Handle<dyn Instance>>,
    /// Databases for reuse, on the shared server, which would create hundreds otherwise.
    idle: Option<IdleDatabases>,
}

impl Server {
    /// The server that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_POSTGRES") {
            Ok(url) => Self::external(&url),
            Err(_) => Self { idle: Some(IdleDatabases::default()), ..Self::with_options(&Options::fast()) },
        })
    }

    /// A server for one test, which may stop, crash or pause it. Blocks until it is ready.
    pub fn private() -> Self {
        Self::with_options(&Options::default())
    }

    /// [`private`](Self::private), which accepts only TLS, with a certificate signed by [`ca_file`](Self::ca_file).
    pub fn private_with_tls() -> Self {
        Self::with_options(&Options { tls: true, ..Options::default() })
    }

    /// [`private`](Self::private), which uses this clock.
    pub fn private_with_clock(clock: &FakeClock) -> Self {
        let environment = clock.environment().map(|(name, value)| (name.into(), value.into())).to_vec();
        Self::with_options(&Options { environment, ..Options::default() })
    }

    /// A private server with these options. Blocks until it is ready.
    pub fn with_options(options: &Options) -> Self {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        with_unused_port("PostgreSQL", |port| Self::create(source, Ipv4Addr::LOCALHOST, port, options))
    }

    /// A private server at this loopback address. Blocks until it is ready.
    pub(crate) fn at(address: Ipv4Addr, port: u16) -> Result<Self, String> {
        let mut options = Options::default();
        options.settings.push(("listen_addresses".to_owned(), address.to_string()));
        match find::source()? {
            EngineSource::Docker => {
                Err("PostgreSQL is not installed and cannot be: install Debian's postgresql".to_owned())
            }
            local @ EngineSource::Local(_) => Self::create(local, address, port, &options),
        }
    }

    /// Runs a statement on the database `postgres`. Blocks.
    pub(crate) fn execute_blocking(&self, sql: &str) -> Result<(), String> {
        let run =
            async { connection::open(&self.url, self.ca_file.as_deref()).await?.batch_execute(sql).await };
        connection::block_on(run).map_err(|error| connection::describe(&error))
    }

    fn create(
        source: &EngineSource,
        address: Ipv4Addr,
        port: u16,
        options: &Options,
    ) -> Result<Self, String> {
        // With characters that must be percent-encoded, so that code that parses URLs by hand fails.
        let password = format!("{:016x}%@/", fastrand::u64(..));
        let host = if options.tls { "localhost".to_owned() } else { address.to_string() };
        let mut url =
            Url::parse(&format!("postgres://{SUPERUSER}@{host}:{port}/postgres")).expect("a valid URL");
        // `set_password` encodes `@` and `/` but takes a `%` as already encoded.
        url.set_password(Some(&password.replace('%', "%25"))).expect("a URL with a host takes a password");
        url.set_query(options.tls.then_some("sslmode=require"));
        let (instance, ca_file, bin_dir): (Arc<Mutex<dyn Instance>>, _, _) = match source {
            EngineSource::Local(bin_dir) => {
                let cluster = cluster::Cluster::create(bin_dir, port, &password, options);
                let ca_file = options.tls.then(|| cluster.ca_file());
                (Arc::new(Mutex::new(cluster)), ca_file, Some(bin_dir.clone()))
            }
            EngineSource::Docker => {
                let (container, ca_file) = docker::container(port, &password, options);
                (Arc::new(Mutex::new(container)), ca_file, None)
            }
        };
        let instance = Handle::new("PostgreSQL", instance);
        instance.lock().launch();
        instance.wait_ready(|| connection::probe(&url, ca_file.as_deref()))?;
        Ok(Self { url, ca_file, bin_dir, instance: Some(instance), idle: None })
    }

    fn external(url: &str) -> Self {
        let url = Url::parse(url).unwrap_or_else(|error| {
            panic!("WEIR_TEST_POSTGRES must be postgres://user:password@host:port/: {error}")
        });
        if let Err(reason) = connection::probe(&url, None) {
            panic!(
                "the server of WEIR_TEST_POSTGRES does not answer: {reason}; start it or unset the variable"
            );
        }
        Self { url, ca_file: None, bin_dir: None, instance: None, idle: None }
    }

    /// A fresh, empty database. The hint becomes part of its name, for debugging; a reused database keeps its old name.
    pub async fn database(&self, name_hint: &str) -> Database {
        let cleanup = match &self.idle {
            Some(idle) => Cleanup::Reuse(Arc::clone(idle)),
            None if self.instance.is_some() => Cleanup::Nothing,
            None => Cleanup::Drop { server: self.url.clone() },
        };
        Database::create(self.url.clone(), self.ca_file.clone(), name_hint, cleanup).await
    }

    /// The address of the server, such as the upstream of a [`Proxy`](crate::proxy::Proxy).
    pub fn addr(&self) -> SocketAddr {
        let host = self.url.host_str().unwrap_or("127.0.0.1");
        let host = if self.instance.is_some() { "127.0.0.1" } else { host };
        let mut found = (host, self.url.port().unwrap_or(5432))
            .to_socket_addrs()
            .unwrap_or_else(|error| panic!("cannot resolve {host} in WEIR_TEST_POSTGRES: {error}"));
        found.next().unwrap_or_else(|| panic!("{host} in WEIR_TEST_POSTGRES has no address"))
    }

    /// The certificate authority (PEM) that signed the server's certificate; `None` without TLS.
    pub fn ca_file(&self) -> Option<&Path> {
        self.ca_file.as_deref()
    }

    /// The directory of `pgbench` and other programs; `None` if the server does not run from local binaries.
    pub fn bin_dir(&self) -> Option<PathBuf> {
        self.bin_dir.clone()
    }

    /// The server's log so far; empty for `WEIR_TEST_POSTGRES`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Stops the server in an orderly way, disconnects its clients and keeps its port reserved.
    pub async fn stop(&mut self) {
        self.own_instance().stop().await;
    }

    /// Starts a stopped or crashed server on the same port and waits until it is ready.
    pub async fn start(&mut self) {
        let (url, ca_file) = (self.url.clone(), self.ca_file.clone());
        self.own_instance().start(move || connection::probe(&url, ca_file.as_deref())).await;
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// Kills the postmaster and all its children with SIGKILL, like a power cut except for the disk's cache.
    pub fn crash(&mut self) {
        self.own_instance().lock().crash();
    }

    /// Freezes every process of the server: the kernel still accepts connections, but nothing responds.
    pub fn pause(&mut self) {
        self.own_instance().lock().pause();
    }

    pub fn resume(&mut self) {
        self.own_instance().lock().resume();
    }

    fn own_instance(&self) -> &Handle<dyn Instance> {
        self.instance.as_ref().expect("only shared() returns an external server, and never mutably")
    }
}

#[cfg(test)]
mod tests;
