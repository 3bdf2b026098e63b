//! `weir serve`: reads the settings, starts the server, and stops it on SIGTERM or SIGINT.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use weir_server::Server;
use weir_server::settings::Settings;
use weir_server::settings::source::{SettingError, Sources};
use weir_server::telemetry::{log_writer, logs};

/// How long to wait until the last log lines are written.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Open files for anything but callers' connections.
const SPARE_FILES: u64 = 1_024;

/// Each flag has an environment variable of the same name and a line in weir.default.toml.
#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct ServeArgs {
    /// The address of the HTTP API [env: WEIR_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// The address of the gRPC API [env: WEIR_GRPC_LISTEN] [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    grpc_listen: Option<String>,
    /// Where the embedded engine and generated secrets live [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    /// "embedded" or a postgres:// URL [env: WEIR_STORE] [default: embedded]
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// The cache in front of the store: "none" or a redis:// URL [env: WEIR_CACHE] [default: none]
    #[arg(long, value_name = "URL")]
    cache: Option<String>,
    /// The broker of messages: "embedded", or a kafka:// or kafka+ssl:// URL [env: WEIR_BROKER] [default: embedded]
    #[arg(long, value_name = "URL")]
    broker: Option<String>,
    /// Any of api, worker, sender, reconciler [env: WEIR_ROLES] [default: all]
    #[arg(long, value_name = "LIST")]
    roles: Option<String>,
    /// A file of settings [env: WEIR_CONFIG] [default: weir.toml if present]
    #[arg(long, value_name = "FILE")]
    config: Option<String>,
}

impl ServeArgs {
    fn into_flags(self) -> BTreeMap<&'static str, String> {
        [
            ("listen", self.listen),
            ("grpc_listen", self.grpc_listen),
            ("data", self.data),
            ("store", self.store),
            ("cache", self.cache),
            ("broker", self.broker),
            ("roles", self.roles),
            ("config", self.config),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }
}

pub(crate) fn run(arguments: ServeArgs) -> anyhow::Result<ExitCode> {
    let settings = read_settings(arguments)?;
    logs::init(&settings.log);
    raise_file_limit(settings.http.max_connections);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve(settings));
    log_writer::flush(LAST_LINES);
    // A thread that is blocked writing to a peer that does not read must not keep the process alive.
    runtime.shutdown_background();
    outcome
}

/// Raises the limit on open files for the connections, up to the hard limit: the usual soft limit is far lower.
fn raise_file_limit(connections: usize) {
    let needed = u64::try_from(connections).unwrap_or(u64::MAX).saturating_add(SPARE_FILES);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let allowed = maximum.map_or(needed, |maximum| maximum.min(needed));
    if current.is_some_and(|current| current < allowed)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum })
    {
        tracing::warn!(%error, "cannot raise the limit on open files; http.max_connections may not be reached");
    }
    if allowed < needed {
        tracing::info!(
            needed,
            allowed,
            "http.max_connections needs more open files than the hard limit allows; raise the limit (ulimit -Hn)"
        );
    }
}

fn read_settings(arguments: ServeArgs) -> Result<Settings, SettingError> {
    Settings::read(Sources::from_process(arguments.into_flags())?)
}

async fn serve(settings: Settings) -> anyhow::Result<ExitCode> {
    // Registered before the start, so that a signal during the start is not lost.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Reaching a file size limit must fail the write, which /health reports, and not kill the process.
    let _file_size = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?;
    let unknown = settings.unknown_variables.clone();
    let server = tokio::select! {
        started = Server::start(settings, None) => started?,
        _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
    };
    for name in unknown {
        tracing::warn!(name, "unknown environment variable is ignored; weir.default.toml lists all settings");
    }
    tracing::info!(target: logs::READY, "{}", server.ready_line());
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping: finishing accepted work");
    if server.stop().await {
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    } else {
        tracing::warn!("stopped with unfinished work after http.shutdown_timeout");
        Ok(ExitCode::FAILURE)
    }
}
