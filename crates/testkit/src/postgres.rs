//! A real PostgreSQL for tests, and fresh databases in it.
//!
//! [`Server::shared`] is one cluster for all tests of a process and cannot be disturbed; a test that stops, crashes
//! or pauses PostgreSQL takes a [`Server::private`] one. Where the server comes from is decided in `find`;
//! `cluster` runs local binaries and `docker` a container.

use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use url::Url;

use crate::clock::FakeClock;
use crate::discover::Source;
use crate::instance::{Handle, Instance, on_an_unused_port};

pub use database::Database;
use database::{After, Spare};

mod cluster;
mod connection;
mod database;
mod docker;
mod find;

const SUPERUSER: &str = "postgres";

/// How to start a server of one's own.
#[derive(Debug, Clone)]
pub struct Options {
    /// `postgresql.conf` settings, on top of PostgreSQL's own defaults.
    pub settings: Vec<(String, String)>,
    /// Serve TLS, and nothing else, with a certificate for `localhost`.
    pub tls: bool,
    /// Keep its files in memory, where there is enough of it.
    pub in_memory: bool,
    /// Variables of its environment, where it is started from local binaries.
    pub environment: Vec<(OsString, OsString)>,
}

impl Default for Options {
    /// Settings for tests: durable as in production, many connections, lock trouble found at once.
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
    /// The shared server's. Tables are made by the ten thousand, each of them some files, for which a disk's file system looks
    /// longer than PostgreSQL for all the rest; in memory a sync costs nothing, so it is as durable as Weir asks for.
    fn fast() -> Self {
        let mut options = Self { in_memory: true, ..Self::default() };
        let small = [("max_wal_size", "128MB"), ("min_wal_size", "32MB")];
        options.settings.extend(small.map(|(name, value)| (name.to_owned(), value.to_owned())));
        options
    }
}

/// A running PostgreSQL. It ends, and its files go, with this value or with the test process.
pub struct Server {
    /// Superuser URL; its path, the database, is replaced for each [`Database`].
    url: Url,
    ca_file: Option<PathBuf>,
    bin_dir: Option<PathBuf>,
    /// None when the server was given by `WEIR_TEST_POSTGRES` and so is not ours to command.
    instance: Option<Handle<dyn Instance>>,
    /// Where databases wait to be used again: on the shared server, which makes hundreds.
    spare: Option<Spare>,
}

impl Server {
    /// The server that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_POSTGRES") {
            Ok(url) => Self::external(&url),
            Err(_) => Self { spare: Some(Spare::default()), ..Self::with_options(&Options::fast()) },
        })
    }

    /// A server of one's own, to be stopped, crashed or paused at will. Blocks until it is ready.
    pub fn private() -> Self {
        Self::with_options(&Options::default())
    }

    /// [`private`](Self::private), but it accepts only TLS; its certificate is signed by [`ca_file`](Self::ca_file).
    pub fn private_with_tls() -> Self {
        Self::with_options(&Options { tls: true, ..Options::default() })
    }

    /// [`private`](Self::private), but it goes by a clock that can be set.
    pub fn private_by(clock: &FakeClock) -> Self {
        let environment = clock.environment().map(|(name, value)| (name.into(), value.into())).to_vec();
        Self::with_options(&Options { environment, ..Options::default() })
    }

    /// A server of one's own with chosen settings. Blocks until it is ready.
    pub fn with_options(options: &Options) -> Self {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        on_an_unused_port("PostgreSQL", |port| Self::create(source, port, options))
    }

    fn create(source: &Source, port: u16, options: &Options) -> Result<Self, String> {
        // Characters that have to be percent-encoded, so that a URL taken apart by hand is found out.
        let password = format!("{:016x}%@/", fastrand::u64(..));
        let host = if options.tls { "localhost" } else { "127.0.0.1" };
        let mut url =
            Url::parse(&format!("postgres://{SUPERUSER}@{host}:{port}/postgres")).expect("a valid URL");
        // `set_password` encodes `@` and `/` but takes a `%` as already encoded.
        url.set_password(Some(&password.replace('%', "%25"))).expect("a URL with a host takes a password");
        url.set_query(options.tls.then_some("sslmode=require"));
        let (instance, ca_file, bin_dir): (Arc<Mutex<dyn Instance>>, _, _) = match source {
            Source::Local(bin_dir) => {
                let cluster = cluster::Cluster::create(bin_dir, port, &password, options);
                let ca_file = options.tls.then(|| cluster.ca_file());
                (Arc::new(Mutex::new(cluster)), ca_file, Some(bin_dir.clone()))
            }
            Source::Docker => {
                let (container, ca_file) = docker::container(port, &password, options);
                (Arc::new(Mutex::new(container)), ca_file, None)
            }
        };
        let instance = Handle::new("PostgreSQL", instance);
        instance.lock().launch();
        instance.wait_ready(|| connection::probe(&url, ca_file.as_deref()))?;
        Ok(Self { url, ca_file, bin_dir, instance: Some(instance), spare: None })
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
        Self { url, ca_file: None, bin_dir: None, instance: None, spare: None }
    }

    /// A fresh, empty database. The hint is part of its name, for whoever looks into the server; one that is used again
    /// keeps the name that it had.
    pub async fn database(&self, name_hint: &str) -> Database {
        let after = match &self.spare {
            Some(spare) => After::Spare(Arc::clone(spare)),
            None if self.instance.is_some() => After::Nothing,
            None => After::Drop { server: self.url.clone() },
        };
        Database::create(self.url.clone(), self.ca_file.clone(), name_hint, after).await
    }

    /// Where the server listens: the upstream for a [`Proxy`](crate::proxy::Proxy).
    pub fn addr(&self) -> SocketAddr {
        let host = self.url.host_str().unwrap_or("127.0.0.1");
        let host = if self.instance.is_some() { "127.0.0.1" } else { host };
        let mut found = (host, self.url.port().unwrap_or(5432))
            .to_socket_addrs()
            .unwrap_or_else(|error| panic!("cannot resolve {host} in WEIR_TEST_POSTGRES: {error}"));
        found.next().unwrap_or_else(|| panic!("{host} in WEIR_TEST_POSTGRES has no address"))
    }

    /// The certificate authority (PEM) that signed the server's certificate; None without TLS.
    pub fn ca_file(&self) -> Option<&Path> {
        self.ca_file.as_deref()
    }

    /// Where `pgbench` and its like are; None when the server does not run from local binaries.
    pub fn bin_dir(&self) -> Option<PathBuf> {
        self.bin_dir.clone()
    }

    /// What the server has logged so far; empty for `WEIR_TEST_POSTGRES`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| instance.lock().log()).unwrap_or_default()
    }

    /// Ends the server in an orderly way, clients disconnected. Its port stays its own.
    pub async fn stop(&mut self) {
        self.commanded().stop().await;
    }

    /// Starts a stopped or crashed server on the same port and waits until it is ready.
    pub async fn start(&mut self) {
        let (url, ca_file) = (self.url.clone(), self.ca_file.clone());
        self.commanded().start(move || connection::probe(&url, ca_file.as_deref())).await;
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// SIGKILL to the postmaster and all its children: what a power cut leaves, apart from the disk's own cache.
    pub fn crash(&mut self) {
        self.commanded().lock().crash();
    }

    /// Freezes every process of the server: it accepts connections (the kernel does) and answers nothing.
    pub fn pause(&mut self) {
        self.commanded().lock().pause();
    }

    pub fn resume(&mut self) {
        self.commanded().lock().resume();
    }

    fn commanded(&self) -> &Handle<dyn Instance> {
        self.instance.as_ref().expect("only shared() gives a server that is not ours, and never mutably")
    }
}

#[cfg(test)]
mod tests;
