//! A real PostgreSQL for tests, and fresh databases in it.
//!
//! [`Server::shared`] is one cluster for all tests of a process and cannot be disturbed; a test that stops, crashes
//! or pauses PostgreSQL takes a [`Server::private`] one. Where the server comes from is decided in `find`;
//! `cluster` runs local binaries and `docker` a container.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use url::Url;

pub use database::Database;

mod certificates;
mod cluster;
mod connection;
mod database;
mod docker;
mod find;

const READY_WITHIN: Duration = Duration::from_secs(60);
const SUPERUSER: &str = "postgres";

/// How to start a server of one's own.
#[derive(Debug, Clone)]
pub struct Options {
    /// `postgresql.conf` settings, on top of PostgreSQL's own defaults.
    pub settings: Vec<(String, String)>,
    /// Serve TLS, and nothing else, with a certificate for `localhost`.
    pub tls: bool,
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
        Self { settings, tls: false }
    }
}

impl Options {
    /// The shared server's: nothing it holds has to outlive a power cut, and databases are made by the hundred.
    fn fast() -> Self {
        let mut options = Self::default();
        options.settings.retain(|(name, _)| name != "fsync");
        let off = ["fsync", "full_page_writes", "synchronous_commit"];
        options.settings.extend(off.map(|name| (name.to_owned(), "off".to_owned())));
        options
    }
}

/// A PostgreSQL server process, wherever it runs. Methods block; they panic when the server cannot be commanded.
trait Instance: Send {
    /// Launches the server and returns before it is ready.
    fn launch(&mut self);
    /// True when a launched server is no longer running.
    fn has_exited(&mut self) -> bool;
    /// Disconnects every client, writes a checkpoint and ends the server.
    fn stop(&mut self);
    /// Kills every process of the server at once.
    fn crash(&mut self);
    fn pause(&mut self);
    fn resume(&mut self);
    fn log(&self) -> String;
    fn bin_dir(&self) -> Option<PathBuf>;
}

/// A running PostgreSQL. It ends, and its files go, with this value or with the test process.
pub struct Server {
    /// Superuser URL; its path, the database, is replaced for each [`Database`].
    url: Url,
    ca_file: Option<PathBuf>,
    /// None when the server was given by `WEIR_TEST_POSTGRES` and so is not ours to command.
    instance: Option<Arc<Mutex<Box<dyn Instance>>>>,
}

impl Server {
    /// The server that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var("WEIR_TEST_POSTGRES") {
            Ok(url) => Self::external(&url),
            Err(_) => Self::with_options(&Options::fast()),
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

    /// A server of one's own with chosen settings. Blocks until it is ready.
    pub fn with_options(options: &Options) -> Self {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        for _ in 0..3 {
            let server = Self::create(source, options);
            match server.wait_ready() {
                Ok(()) => return server,
                // Someone took the port between our look and PostgreSQL's bind.
                Err(reason) if reason.contains("Address already in use") => {}
                Err(reason) => panic!("{reason}"),
            }
        }
        panic!("three free ports in a row were taken before PostgreSQL could bind them; see `ss -ltnp`");
    }

    /// Creates and launches; does not wait.
    fn create(source: &find::Source, options: &Options) -> Self {
        let port = crate::ports::unused();
        // Characters that have to be percent-encoded, so that a URL taken apart by hand is found out.
        let password = format!("{:016x}%@/", fastrand::u64(..));
        let host = if options.tls { "localhost" } else { "127.0.0.1" };
        let mut url =
            Url::parse(&format!("postgres://{SUPERUSER}@{host}:{port}/postgres")).expect("a valid URL");
        // `set_password` encodes `@` and `/` but takes a `%` as already encoded.
        url.set_password(Some(&password.replace('%', "%25"))).expect("a URL with a host takes a password");
        let (mut instance, ca_file): (Box<dyn Instance>, _) = match source {
            find::Source::Local(bin_dir) => {
                let cluster = cluster::Cluster::create(bin_dir, port, &password, options);
                let ca_file = options.tls.then(|| cluster.ca_file());
                (Box::new(cluster), ca_file)
            }
            find::Source::Docker => {
                let container = docker::Container::create(port, &password, options);
                let ca_file = options.tls.then(|| container.ca_file());
                (Box::new(container), ca_file)
            }
        };
        url.set_query(options.tls.then_some("sslmode=require"));
        instance.launch();
        Self { url, ca_file, instance: Some(Arc::new(Mutex::new(instance))) }
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
        Self { url, ca_file: None, instance: None }
    }

    /// A fresh, empty database. The hint is part of its name, for whoever looks into the server.
    pub async fn database(&self, name_hint: &str) -> Database {
        Database::create(self.url.clone(), self.ca_file.clone(), name_hint, self.instance.is_none()).await
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
        self.instance.as_ref().and_then(|instance| lock(instance).bin_dir())
    }

    /// What the server has logged so far; empty for `WEIR_TEST_POSTGRES`.
    pub fn log(&self) -> String {
        self.instance.as_ref().map(|instance| lock(instance).log()).unwrap_or_default()
    }

    /// Ends the server in an orderly way, clients disconnected. Its port stays its own.
    pub async fn stop(&mut self) {
        let instance = Arc::clone(self.commanded());
        unblocked(move || lock(&instance).stop()).await;
    }

    /// Starts a stopped or crashed server on the same port and waits until it is ready.
    pub async fn start(&mut self) {
        lock(self.commanded()).launch();
        let probe =
            Self { url: self.url.clone(), ca_file: self.ca_file.clone(), instance: self.instance.clone() };
        unblocked(move || probe.wait_ready().unwrap_or_else(|reason| panic!("{reason}"))).await;
    }

    pub async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    /// SIGKILL to the postmaster and all its children: what a power cut leaves, apart from the disk's own cache.
    pub fn crash(&mut self) {
        lock(self.commanded()).crash();
    }

    /// Freezes every process of the server: it accepts connections (the kernel does) and answers nothing.
    pub fn pause(&mut self) {
        lock(self.commanded()).pause();
    }

    pub fn resume(&mut self) {
        lock(self.commanded()).resume();
    }

    fn commanded(&self) -> &Arc<Mutex<Box<dyn Instance>>> {
        self.instance.as_ref().expect("only shared() gives a server that is not ours, and never mutably")
    }

    /// For a server just launched.
    fn wait_ready(&self) -> Result<(), String> {
        let end = Instant::now() + READY_WITHIN;
        loop {
            let last = match connection::probe(&self.url, self.ca_file.as_deref()) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if self.instance.as_ref().is_some_and(|instance| lock(instance).has_exited()) {
                return Err(format!("PostgreSQL exited while starting; its log:\n{}", self.log()));
            }
            if Instant::now() > end {
                let log = self.log();
                return Err(format!(
                    "PostgreSQL was not ready within {READY_WITHIN:?}: {last}; its log:\n{log}"
                ));
            }
            // Each attempt is a line in the server's log, and recovery after a crash can take seconds.
            std::thread::sleep(Duration::from_millis(25));
        }
    }
}

fn lock(instance: &Mutex<Box<dyn Instance>>) -> MutexGuard<'_, Box<dyn Instance>> {
    instance.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs blocking work beside the runtime, so that a proxy or a load in the same test goes on meanwhile.
async fn unblocked(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = tokio::task::spawn_blocking(work).await {
        std::panic::resume_unwind(error.into_panic());
    }
}

#[cfg(test)]
mod tests;
