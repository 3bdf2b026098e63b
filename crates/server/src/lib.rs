//! The server: starts settings, credentials, engines, services, HTTP and workers in order, and stops them in order.

mod address_limits;
mod app;
pub mod auth;
mod buffer_budget;
mod console;
mod engines;
mod gateway;
pub mod grpc;
pub mod http;
mod operations;
pub mod outbound;
mod peer;
mod purge;
mod quota;
mod redact;
mod request;
pub mod routes;
mod sale;
pub mod settings;
mod shutdown;
mod slot;
pub mod telemetry;
mod tier;
mod tls;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use weir_core::Clock;

use crate::app::App;
use crate::auth::Auth;
use crate::engines::Engines;
use crate::http::router::Router;
use crate::http::serve::HttpServer;
use crate::request::encryption::Keyring;
use crate::request::service::key_check;
use crate::routes::routes;
use crate::settings::Settings;
use crate::settings::source::SettingError;
use crate::settings::store::BrokerChoice;
use crate::telemetry::span_export::{self, SpanExport};
use crate::tls::Tls;

pub use crate::request::key_rotation::{KeyRotation, KeyUsage, RotationProgress};

/// Opens the store and the keys of requests, for commands that look after the keys.
/// Fails like [`Server::start`], and when a key would have to be created.
pub async fn open_keys(settings: &Settings) -> Result<KeyRotation, StartError> {
    let keys = Keyring::load_existing(&settings.request, &settings.process.data)?;
    let store = engines::open_store(settings).await.map_err(|error| cannot_open(settings, error))?;
    Ok(KeyRotation { store: store.requests, keys })
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("cannot open the store")]
    Engine(#[from] weir_store::Error),
    #[error("cannot {action}")]
    System {
        action: String,
        #[source]
        source: std::io::Error,
    },
}

/// A running server.
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    /// The address and the task of gRPC; only with the role `api`.
    grpc: Option<(SocketAddr, JoinHandle<()>)>,
    http: HttpServer,
    workers: TaskTracker,
    /// Sends spans, if a collector is set.
    span_export: Option<SpanExport>,
}

impl Server {
    /// Starts everything that the settings ask for. `clock` replaces the engine's own, for tests.
    /// Fails when the data directory cannot be created, an engine cannot be opened, or the address cannot be bound.
    pub async fn start(settings: Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self, StartError> {
        let data = &settings.process.data;
        auth::secrets::create_directory(data).map_err(|error| {
            SettingError::new("data", data.display(), format!("a directory that can be created ({error})"))
        })?;
        engines::lost_database::check(&settings, &auth::secrets::SERVER_FILES)?;
        engines::lost_database::create_database_first(&settings)?;
        let auth = Auth::load(&settings)?;
        let keys = Keyring::load(&settings.request, data)?;
        let tls = settings.tls.clone().map(Tls::load).transpose()?;
        let http = HttpServer::start(settings.http.threads())
            .map_err(|source| StartError::System { action: "start the HTTP threads".to_owned(), source })?;
        let mut engines =
            Engines::open(&settings, clock).await.map_err(|error| cannot_open(&settings, error))?;
        auth::file_modes::warn_about_exposed_files(&settings);
        // Postgres takes several round trips per batch, and after each the lane would wait behind the connections of its
        // thread. With SQLite, which has its own thread, a lane only passes on batches and outcomes.
        if !engines.store.is_shared {
            engines.lane_runtimes = http.runtimes();
        }
        if settings.process.roles.api || settings.process.roles.worker {
            check_keys(&engines, &keys, &settings).await?;
        }
        if settings.process.roles.api {
            auth.tokens.fetch_first_keys().await;
        }
        let process = &settings.process;
        let (listeners, address) = http::serve::bind(process.listen, settings.http.threads())
            .await
            .map_err(|source| cannot_listen(process.listen, "--listen, WEIR_LISTEN", source))?;
        let grpc = if process.roles.api {
            Some(listen(process.grpc_listen, "--grpc-listen, WEIR_GRPC_LISTEN").await?)
        } else {
            None
        };
        let app = App::new(settings, auth, keys, engines);
        let span_export = span_export::start(&app.settings.traces, &app.metrics)?;
        if app.settings.process.roles.api {
            engines::retry_at_start(|| app.tier.load()).await?;
        }
        let grpc = grpc.map(|(listener, address)| {
            (address, tokio::spawn(grpc::serve(listener, tls.clone(), Arc::clone(&app))))
        });
        let workers = workers::start(&app)?;
        http.serve(listeners, tls.as_ref(), Router::new(routes(), &app), &app);
        if let Some(tls) = tls {
            tokio::spawn(tls.follow_files(app.shutdown.closing().clone()));
        }
        Ok(Self { app, address, grpc, http, workers, span_export })
    }

    /// The address of the HTTP API.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[must_use]
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(|(address, _)| *address)
    }

    /// One line for the operator: the addresses, the engines, and where the secrets are.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let data = &self.app.settings.process.data;
        let scheme = if self.app.settings.tls.is_some() { "https" } else { "http" };
        let engine = match &self.app.settings.store.engine {
            settings::store::EngineChoice::Embedded => format!("embedded SQLite in {}", data.display()),
            settings::store::EngineChoice::Postgres(target) => format!("Postgres at {}", target.address()),
        };
        let grpc = self.grpc_address().map_or_else(String::new, |address| format!(", gRPC on {address}"));
        let cache = match &self.app.settings.store.cache {
            settings::store::CacheChoice::None => String::new(),
            settings::store::CacheChoice::Redis(target) => format!(" · Redis at {}", target.address()),
        };
        let broker = match &self.app.settings.store.broker {
            BrokerChoice::Embedded => String::new(),
            BrokerChoice::Kafka(brokers) => {
                format!(" · Kafka at {}", brokers.bootstrap_servers())
            }
        };
        format!(
            "weir ready on {scheme}://{}{grpc} · {engine}{cache}{broker} · secrets in {}",
            self.address,
            data.display()
        )
    }

    /// Stops the server after it has finished what it accepted; `weir serve` calls it on SIGTERM and SIGINT. Beside `finish` run
    /// the steps of `shutdown.rs`: at once, at 3/4 and at 13/16 of `http.shutdown_timeout`. Returns false if that was not enough.
    pub async fn stop(self) -> bool {
        let timeout = self.app.settings.http.shutdown_timeout;
        let shutdown = self.app.shutdown.clone();
        let steps = tokio::spawn(async move { shutdown.run(timeout).await });
        let is_finished = tokio::time::timeout(timeout, self.finish()).await.is_ok();
        steps.abort();
        is_finished
    }

    /// Waits for HTTP, gRPC and tunnels, which feed the lanes, then drains the lanes, then waits for the workers, which began to
    /// end when the stop began.
    async fn finish(self) {
        self.http.wait_until_closed().await;
        if let Some((_, grpc)) = self.grpc {
            let _ = grpc.await;
        }
        self.app.gateway.drain().await;
        self.app.quota.drain().await;
        self.app.slot.drain().await;
        self.app.requests.drain().await;
        self.app.tier.drain().await;
        self.app.sale.drain().await;
        self.workers.wait().await;
        self.http.stop_threads().await;
        if let Some(span_export) = self.span_export {
            span_export.stop().await;
        }
    }
}

/// Reports a database that must not be used, and a client of Kafka that cannot be created, as a wrong setting.
fn cannot_open(settings: &Settings, error: weir_store::Error) -> StartError {
    if let (
        weir_store::Error::Failed { engine: weir_queue::kafka::ENGINE, source },
        BrokerChoice::Kafka(brokers),
    ) = (&error, &settings.store.broker)
    {
        return SettingError::unusable("broker", brokers, source).into();
    }
    match (weir_store_postgres::unsuitable(&error), &settings.store.engine) {
        (Some(reason), settings::store::EngineChoice::Postgres(target)) => {
            let server = format!("Postgres at {}", target.address());
            SettingError::unusable("store", server, reason).into()
        }
        _ => error.into(),
    }
}

/// Checks that this server has the keys of all encrypted payloads in the store.
async fn check_keys(engines: &Engines, keys: &Keyring, settings: &Settings) -> Result<(), StartError> {
    let (store, now) = (Arc::clone(&engines.store.requests), engines.store.wall_clock.now());
    let check = || key_check::missing_key(&*store, keys, now, settings.request.retention);
    match engines::retry_at_start(check).await? {
        Some(missing) => Err(missing.into()),
        None => Ok(()),
    }
}

async fn listen(address: SocketAddr, setting: &str) -> Result<(TcpListener, SocketAddr), StartError> {
    let refused = |source| cannot_listen(address, setting, source);
    let listener = http::serve::bind_one(address).await.map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    Ok((listener, bound))
}

fn cannot_listen(address: SocketAddr, setting: &str, source: std::io::Error) -> StartError {
    StartError::System { action: format!("listen on {address} ({setting})"), source }
}
