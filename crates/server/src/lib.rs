//! The server: settings, credentials, engines, services, HTTP and workers, put together and taken apart in order.

pub mod app;
pub mod auth;
pub mod config;
pub mod engine;
pub mod http;
pub mod outbound;
pub mod proxy;
pub mod redact;
pub mod seal;
pub mod service;
pub mod telemetry;
pub mod worker;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use weir_core::Clock;

use crate::app::App;
use crate::auth::Auth;
use crate::config::Settings;
use crate::config::source::SettingError;
use crate::engine::{Engine, Engines};
use crate::seal::Keyring;

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
    http: JoinHandle<()>,
    workers: TaskTracker,
}

impl Server {
    /// Starts everything the settings ask for. `clock` replaces the engine's own, for tests.
    ///
    /// # Errors
    /// When the data directory, an engine or the address cannot be had.
    pub async fn start(settings: Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self, StartError> {
        let data = &settings.process.data;
        auth::secrets::create_directory(data).map_err(|error| {
            SettingError::new("data", data.display(), format!("a directory that can be made ({error})"))
        })?;
        let auth = Auth::load(&settings)?;
        let keys = Keyring::load(&settings.request, data)?;
        let engines = Engines::open(&settings, clock).await?;
        let listen = settings.process.listen;
        let bound = |what: &'static str| {
            move |source| StartError::System {
                what: format!("{what} {listen} (--listen, WEIR_LISTEN)"),
                source,
            }
        };
        let listener = http::serve::bind(listen).await.map_err(bound("listen on"))?;
        let address = listener.local_addr().map_err(bound("listen on"))?;
        let app = App::new(settings, auth, keys, engines);
        if app.settings.process.roles.api {
            app.tier.load().await?;
        }
        let http = tokio::spawn(http::serve::serve(
            listener,
            http::router::Routes::new(&app),
            app.settings.http,
            Arc::clone(&app.metrics),
            app.closing.clone(),
        ));
        let workers = worker::start::start(&app)?;
        Ok(Self { app, address, http, workers })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// One line for whoever started it: where it is, what it runs on, where the secrets are.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let data = &self.app.settings.process.data;
        let engine = match &self.app.engines.store {
            Engine::Sqlite(_) => format!("embedded SQLite in {}", data.display()),
            Engine::Postgres(_) => match &self.app.settings.store.engine {
                config::store::EngineChoice::Postgres(target) => format!("Postgres at {}", target.address()),
                config::store::EngineChoice::Embedded => "Postgres".to_owned(),
            },
        };
        let cache = match &self.app.settings.store.cache {
            config::store::CacheChoice::None => String::new(),
            config::store::CacheChoice::Redis(target) => format!(" · Redis at {}", target.address()),
        };
        let broker = match &self.app.settings.store.broker {
            config::store::BrokerChoice::Embedded => String::new(),
            config::store::BrokerChoice::Kafka(brokers) => {
                format!(" · Kafka at {}", brokers.bootstrap_servers())
            }
        };
        format!(
            "weir ready on http://{} · {engine}{cache}{broker} · secrets in {}",
            self.address,
            data.display()
        )
    }

    /// Finishes what was accepted, within the settings' deadline. False when that was not enough.
    pub async fn stop(self) -> bool {
        self.app.closing.cancel();
        let deadline = self.app.settings.http.shutdown_timeout;
        tokio::time::timeout(deadline, self.finish()).await.is_ok()
    }

    /// Requests first, since they feed the lanes; then the lanes; then whoever works on what they enqueued.
    async fn finish(self) {
        let _ = self.http.await;
        self.app.ai.drain().await;
        self.app.quota.drain().await;
        self.app.slot.drain().await;
        self.app.requests.drain().await;
        self.app.tier.drain().await;
        self.app.sale.drain().await;
        self.workers.wait().await;
    }
}
