//! A run of `weir serve` under load with all roles, and the checks after it.

use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use weir_bench::{Body, Expect, LoadOptions, Report, Target, Template, configure, resolve};

use crate::audit::{self, Promises};
use crate::process::{self, Process};
use crate::results::{Row, Run};
use crate::table::spread;
use crate::{Bench, HOT};

/// The host in every request, whatever the port, so that all servers get the same bytes.
pub(crate) const HOST: &str = "127.0.0.1:8080";
const SEND: &str = r#"","message":"your parcel is on its way"}"#;
const UNREACHABLE: u32 = 2_147_483_647;

/// The addresses of the engines; without any, the embedded engine is used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Engines<'a> {
    /// An empty database.
    pub(crate) postgres: Option<&'a str>,
    /// An empty Redis.
    pub(crate) redis: Option<&'a str>,
    pub(crate) kafka: Option<&'a str>,
}

impl Engines<'_> {
    pub(crate) const EMBEDDED: Self = Self { postgres: None, redis: None, kafka: None };

    pub(crate) fn name(&self) -> String {
        let used = [("Postgres", self.postgres), ("Redis", self.redis), ("Kafka", self.kafka)];
        let used: Vec<&str> = used.iter().filter_map(|(name, url)| url.map(|_| *name)).collect();
        if used.is_empty() { "embedded".to_owned() } else { used.join(" + ") }
    }
}

/// The load.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// Messages of this many users, who never reach their limits.
    Accepted { keys: u64 },
    /// Messages of one user, who has reached the limit.
    Refused,
}

impl Load {
    fn keys(self) -> u64 {
        match self {
            Self::Accepted { keys } => keys,
            Self::Refused => HOT,
        }
    }

    fn limit(self) -> u32 {
        match self {
            Self::Accepted { .. } => UNREACHABLE,
            Self::Refused => 1,
        }
    }

    fn expect(self) -> Expect {
        match self {
            Self::Accepted { .. } => Expect::Success,
            Self::Refused => Expect::Status(429),
        }
    }

    fn name(self) -> String {
        match self {
            Self::Accepted { keys } => spread(keys, "key"),
            Self::Refused => "refusals".to_owned(),
        }
    }
}

/// Returns `weir serve` on a data directory, with default settings except for the engines.
pub(crate) fn serve(data: &Path, engines: Engines<'_>) -> Command {
    let mut command = process::server();
    command.arg("serve").env("WEIR_DATA", data);
    let settings =
        [("WEIR_STORE", engines.postgres), ("WEIR_CACHE", engines.redis), ("WEIR_BROKER", engines.kafka)];
    command.envs(settings.into_iter().filter_map(|(name, url)| Some((name, url?))));
    command
}

/// Returns the data directory of a run.
pub(crate) fn data(bench: &Bench, engines: Engines<'_>, load: Load) -> PathBuf {
    let name = bench.name(&format!("{}, {}", engines.name(), load.name()));
    bench.path().join(name).join("data")
}

/// Loads a fresh server, then compares its audit with its responses.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>, load: Load) -> Result<Run> {
    let name = bench.name(&format!("weir {}, {}", engines.name(), load.name()));
    eprintln!("measuring: {name}");
    let data = data(bench, engines, load);
    let directory = data.parent().unwrap_or(bench.path());
    let mut server = Process::spawn(serve(&data, engines), directory)?;
    let url = server.ready_url().await.context("start weir")?;
    prepare(&url, load).await?;
    let report = drive(bench, &name, &url, load).await?;
    let admin_key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
    let audit = audit::wait_and_audit(&url, admin_key.trim(), promises(&report, engines, load)).await;
    let mut failures: Vec<String> = audit.failures.iter().map(|found| format!("{name}: {found}")).collect();
    if let Err(error) = server.stop().await {
        failures.push(format!("{name}: {error:#}"));
    }
    Ok(Run { row: Row { sender: audit.sender, ..Row::from_report(&report) }, failures })
}

/// The same load over keep-alive connections and over short ones.
pub(crate) struct Connections {
    pub(crate) lasting: Row,
    pub(crate) short: Row,
}

/// Loads a server with denied messages over keep-alive connections, and over connections of ten requests.
pub(crate) async fn measure_connections(bench: &Bench) -> Result<Connections> {
    let directory = bench.path().join("connections");
    let mut server = Process::spawn(serve(&directory.join("data"), Engines::EMBEDDED), &directory)?;
    let url = server.ready_url().await.context("start weir")?;
    prepare(&url, Load::Refused).await?;
    let mut rows = Vec::new();
    for (name, requests_per_connection) in [
        ("weir embedded, refusals, keep-alive", None),
        ("weir embedded, refusals, 10 requests a connection", NonZeroU32::new(10)),
    ] {
        eprintln!("measuring: {name}");
        let target = target(name, &url, "/api/send", SEND).await?;
        let options = LoadOptions { requests_per_connection, ..options(bench, Load::Refused) };
        let report = weir_bench::measure(&target, &options).await.with_context(|| format!("load {name}"))?;
        rows.push(Row::from_report(&report));
    }
    server.stop().await.context("stop weir")?;
    let [lasting, short] = <[Row; 2]>::try_from(rows).ok().context("two rows")?;
    Ok(Connections { lasting, short })
}

/// Creates the users and, if their messages are to be denied, exhausts their limits.
async fn prepare(url: &str, load: Load) -> Result<()> {
    let limits = format!(r#"","rateLimit":{},"timeWindow":1440}}"#, load.limit());
    let users = target("creating users", url, "/api/config", &limits).await?;
    configure(&users, load.keys()).await.context("create the users")?;
    if matches!(load, Load::Refused) {
        let last = target("the last message", url, "/api/send", SEND).await?;
        configure(&last, load.keys()).await.context("send the last message before the limit")?;
    }
    Ok(())
}

/// Runs the load of every HTTP run: a closed loop.
pub(crate) async fn drive(bench: &Bench, name: &str, url: &str, load: Load) -> Result<Report> {
    let target = target(name, url, "/api/send", SEND).await?;
    weir_bench::measure(&target, &options(bench, load)).await.with_context(|| format!("load {name}"))
}

fn options(bench: &Bench, load: Load) -> LoadOptions {
    LoadOptions {
        connections: bench.connections,
        warmup: bench.warmup,
        duration: bench.duration,
        keys: load.keys(),
        expect: load.expect(),
        ..LoadOptions::default()
    }
}

async fn target(name: &str, url: &str, path: &str, after_user: &str) -> Result<Target> {
    let (address, _) = resolve(url, false).await?;
    let body = Body { before: r#"{"userId":"bench-"#.to_owned(), after: after_user.to_owned() };
    Ok(Target { name: name.to_owned(), address, template: Template::post_json(HOST, path, &body) })
}

/// Derives from the responses what the audit must show.
fn promises(report: &Report, engines: Engines<'_>, load: Load) -> Promises {
    let accepted = match load {
        Load::Accepted { .. } => report.expected(),
        // The message sent in `prepare`.
        Load::Refused => HOT,
    };
    let (has_ledger, counts_first) = (engines.kafka.is_none(), engines.redis.is_some());
    Promises { users: load.keys(), accepted, has_ledger, counts_first }
}
