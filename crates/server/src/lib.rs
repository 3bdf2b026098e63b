//! The server: settings, credentials, engines, services, HTTP and workers, put together and taken apart in order.

mod address_limits;
mod app;
pub mod auth;
mod buffer_budget;
mod engines;
mod gateway;
pub mod grpc;
pub mod http;
mod operations;
mod outbound;
mod peer;
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

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting is wrong; the sentence says how.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// An engine could not be opened.
    #[error("cannot open the store")]
    Engine(#[from] weir_store::Error),
    /// The system said no.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: String,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
}

/// A server that runs.
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    /// Where gRPC is served, and by whom; only with the role api.
    grpc: Option<(SocketAddr, JoinHandle<()>)>,
    http: HttpServer,
    workers: TaskTracker,
}

impl Server {
    /// Starts everything the settings ask for. `clock` replaces the engine's own, for tests.
    /// Fails when the data directory, an engine or the address cannot be had.
    pub async fn start(settings: Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self, StartError> {
        let data = &settings.process.data;
        auth::secrets::create_directory(data).map_err(|error| {
            SettingError::new("data", data.display(), format!("a directory that can be made ({error})"))
        })?;
        engines::lost_database::check(&settings, &auth::secrets::SERVER_FILES)?;
        engines::lost_database::create_first(&settings)?;
        let auth = Auth::load(&settings)?;
        let keys = Keyring::load(&settings.request, data)?;
        let http = HttpServer::start(settings.http.threads())
            .map_err(|source| StartError::System { what: "start the HTTP threads".to_owned(), source })?;
        let mut engines =
            Engines::open(&settings, clock).await.map_err(|error| cannot_open(&settings, error))?;
        auth::file_modes::warn_about_exposed_files(&settings);
        // Postgres answers a batch in several round trips, and after each a lane would wait behind the connections of its thread;
        // SQLite has a thread of its own, and the lane nothing to do but to hand over and to answer.
        if !engines.store.is_shared {
            engines.lane_runtimes = http.runtimes();
        }
        if settings.process.roles.api || settings.process.roles.worker {
            check_keys(&engines, &keys, &settings).await?;
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
        if app.settings.process.roles.api {
            engines::patiently(|| app.tier.load()).await?;
        }
        let grpc =
            grpc.map(|(listener, address)| (address, tokio::spawn(grpc::serve(listener, Arc::clone(&app)))));
        let workers = workers::start(&app)?;
        http.serve(listeners, Router::new(routes(), &app), &app);
        Ok(Self { app, address, grpc, http, workers })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it serves gRPC.
    #[must_use]
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(|(address, _)| *address)
    }

    /// One line for whoever started it: where it is, what it runs on, where the secrets are.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let data = &self.app.settings.process.data;
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
            settings::store::BrokerChoice::Embedded => String::new(),
            settings::store::BrokerChoice::Kafka(brokers) => {
                format!(" · Kafka at {}", brokers.bootstrap_servers())
            }
        };
        format!(
            "weir ready on http://{}{grpc} · {engine}{cache}{broker} · secrets in {}",
            self.address,
            data.display()
        )
    }

    /// Finishes what was accepted, within the settings' deadline. False when that was not enough.
    pub async fn stop(self) -> bool {
        let timeout = self.app.settings.http.shutdown_timeout;
        let shutdown = self.app.shutdown.clone();
        let steps = tokio::spawn(async move { shutdown.run(timeout).await });
        let is_finished = tokio::time::timeout(timeout, self.finish()).await.is_ok();
        steps.abort();
        is_finished
    }

    /// Requests first, since they feed the lanes; then the lanes; then whoever works on what they enqueued.
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
    }
}

/// A database that must not be used is a setting to be mended, like a wrong one.
fn cannot_open(settings: &Settings, error: weir_store::Error) -> StartError {
    match (weir_store_postgres::unsuitable(&error), &settings.store.engine) {
        (Some(reason), settings::store::EngineChoice::Postgres(target)) => {
            let server = format!("Postgres at {}", target.address());
            SettingError::unusable("store", server, reason).into()
        }
        _ => error.into(),
    }
}

/// Makes sure that this server can open what others have sealed in the store.
async fn check_keys(engines: &Engines, keys: &Keyring, settings: &Settings) -> Result<(), StartError> {
    let (store, now) = (Arc::clone(&engines.store.requests), engines.store.wall_clock.now());
    let check = || key_check::missing_key(&*store, keys, now, settings.request.retention);
    match engines::patiently(check).await? {
        Some(missing) => Err(missing.into()),
        None => Ok(()),
    }
}

/// Binds an address that a setting names.
async fn listen(address: SocketAddr, setting: &str) -> Result<(TcpListener, SocketAddr), StartError> {
    let refused = |source| cannot_listen(address, setting, source);
    let listener = http::serve::bind_one(address).await.map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    Ok((listener, bound))
}

fn cannot_listen(address: SocketAddr, setting: &str, source: std::io::Error) -> StartError {
    StartError::System { what: format!("listen on {address} ({setting})"), source }
}
