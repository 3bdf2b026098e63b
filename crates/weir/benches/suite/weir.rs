//! One run of `weir serve` under load, with every role on, and the checks after it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use weir_bench::{Body, LoadOptions, Report, Target, Template, configure, resolve};

use crate::audit;
use crate::process::{self, Process};
use crate::results::{Row, Run};
use crate::table::grouped;
use crate::{Bench, HOT};

/// The same in every request whatever the port, so that all servers get the same bytes.
const HOST: &str = "127.0.0.1:8080";
/// A limit and a window (in minutes) that no run can reach.
const CONFIGURE: &str = r#"","rateLimit":2147483647,"timeWindow":1440}"#;
const SEND: &str = r#"","message":"your parcel is on its way"}"#;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Store<'a> {
    Embedded,
    /// The URL of an empty database.
    Postgres(&'a str),
}

/// `weir serve` on a data directory, every setting at its default but the store.
pub(crate) fn serve(data: &Path, store: Store<'_>) -> Command {
    let mut command = process::weir();
    command.arg("serve").env("WEIR_DATA", data);
    if let Store::Postgres(url) = store {
        command.env("WEIR_STORE", url);
    }
    command
}

/// Where a run on the embedded engine over `keys` users leaves its data.
pub(crate) fn embedded_data(scratch: &Path, keys: u64) -> PathBuf {
    scratch.join(format!("embedded-{keys}")).join("data")
}

/// Loads a fresh server, then holds its books against the answers it gave.
pub(crate) async fn measure(bench: &Bench, store: Store<'_>, keys: u64) -> Result<Run> {
    let engine = if matches!(store, Store::Embedded) { "embedded" } else { "Postgres" };
    let spread =
        if keys == HOT { "one hot key".to_owned() } else { format!("{} keys", grouped(keys as f64)) };
    let name = format!("weir {engine}, {spread}");
    eprintln!("measuring: {name}");
    let data = match store {
        Store::Embedded => embedded_data(bench.path(), keys),
        Store::Postgres(_) => bench.path().join(format!("postgres-{keys}")).join("data"),
    };
    let directory = data.parent().unwrap_or(bench.path());
    let mut server = Process::spawn(serve(&data, store), directory)?;
    let url = server.ready_url().await.context("start weir")?;
    create_users(&url, keys).await?;
    let report = load(bench, &name, &url, keys).await?;
    let admin_key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
    let audit = audit::hold_to_account(&url, admin_key.trim(), accepted(&report), keys).await;
    let mut failures: Vec<String> = audit.failures.iter().map(|found| format!("{name}: {found}")).collect();
    if let Err(error) = server.stop().await {
        failures.push(format!("{name}: {error:#}"));
    }
    Ok(Run { row: Row { sender: audit.sender, ..Row::from_report(&report) }, failures })
}

async fn create_users(url: &str, keys: u64) -> Result<()> {
    let (address, _) = resolve(url, false).await?;
    let template = Template::post_json(HOST, "/api/config", &body(CONFIGURE));
    let target = Target { name: "creating users".to_owned(), address, template };
    configure(&target, keys).await.context("create the users")
}

/// The load of every HTTP run: 128 connections in a closed loop.
pub(crate) async fn load(bench: &Bench, name: &str, url: &str, keys: u64) -> Result<Report> {
    let (address, _) = resolve(url, false).await?;
    let template = Template::post_json(HOST, "/api/send", &body(SEND));
    let target = Target { name: name.to_owned(), address, template };
    let options =
        LoadOptions { warmup: bench.warmup, duration: bench.duration, keys, ..LoadOptions::default() };
    weir_bench::measure(&target, &options).await.with_context(|| format!("load {name}"))
}

/// Answers that promised something.
pub(crate) fn accepted(report: &Report) -> u64 {
    report.statuses.iter().filter(|(status, _)| (200..300).contains(*status)).map(|(_, count)| count).sum()
}

fn body(after: &str) -> Body {
    Body { before: r#"{"userId":"bench-"#.to_owned(), after: after.to_owned() }
}
