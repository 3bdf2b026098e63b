//! `weir serve`: reads the settings, starts the server, and stops it when the system asks.

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

/// How long the last log lines are waited for.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Open files besides those of callers.
const SPARE_FILES: u64 = 1_024;

/// Each flag has a variable of the same name, and a line in weir.default.toml.
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
    /// What stands before the store on hot paths: "none" or a redis:// URL [env: WEIR_CACHE] [default: none]
    #[arg(long, value_name = "URL")]
    cache: Option<String>,
    /// What carries messages: "embedded" or a kafka:// URL [env: WEIR_BROKER] [default: embedded]
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
    // A sender stuck in writing to somebody who does not read must not keep the process.
    runtime.shutdown_background();
    outcome
}

/// Makes room for the connections, as far as the system lets us: the usual limit of a process is far below what it could have.
fn raise_file_limit(connections: usize) {
    let needed = u64::try_from(connections).unwrap_or(u64::MAX).saturating_add(SPARE_FILES);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let allowed = maximum.map_or(needed, |maximum| maximum.min(needed));
    if current.is_some_and(|current| current < allowed)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum })
    {
        tracing::warn!(%error, "the limit on open files could not be raised");
    }
    if allowed < needed {
        tracing::info!(
            needed,
            allowed,
            "http.max_connections needs more open files than this process may have"
        );
    }
}

fn read_settings(arguments: ServeArgs) -> Result<Settings, SettingError> {
    Settings::read(Sources::from_process(arguments.into_flags())?)
}

async fn serve(settings: Settings) -> anyhow::Result<ExitCode> {
    // Asked for before the start, so that a stop during it is not lost.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // A limit on the size of files is an error of the write that reaches it, which /health tells of, and not the end of the
    // process.
    let _file_size = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?;
    let unknown = settings.unknown_variables.clone();
    let server = tokio::select! {
        started = Server::start(settings, None) => started?,
        _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
    };
    for name in unknown {
        tracing::warn!(
            name,
            "no setting has the name of this variable; weir.default.toml lists those that exist"
        );
    }
    tracing::info!(target: logs::READY, "{}", server.ready_line());
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping: finishing what was accepted");
    if server.stop().await {
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    } else {
        tracing::warn!("stopped before everything was finished (http.shutdown_timeout)");
        Ok(ExitCode::FAILURE)
    }
}
