//! `weir keys`: which keys requests are encrypted with, and encrypting them again after a rotation.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use weir_server::settings::Settings;
use weir_server::settings::source::Sources;
use weir_server::{KeyRotation, KeyUsage, RotationProgress, open_keys};

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Count which keys are in use, and decrypt everything: exit code 0 if that is possible
    Check(StoreArgs),
    /// Encrypt everything with the first key, beside running servers; run it again to resume
    Rotate(RotateArgs),
}

/// The settings of the servers, from the same sources.
#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct StoreArgs {
    /// Where the embedded engine and generated keys live; its server must be stopped [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    /// "embedded" or a postgres:// URL [env: WEIR_STORE] [default: embedded]
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// A file of settings [env: WEIR_CONFIG] [default: weir.toml if present]
    #[arg(long, value_name = "FILE")]
    config: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RotateArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// How many requests are encrypted per second, at most
    #[arg(long, value_name = "COUNT", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    per_second: u32,
}

pub(crate) fn run(command: KeysCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            KeysCommand::Check(store) => check(&open(store).await?).await,
            KeysCommand::Rotate(RotateArgs { store, per_second }) => {
                rotate(&open(store).await?, per_second).await
            }
        }
    })
}

async fn open(StoreArgs { data, store, config }: StoreArgs) -> anyhow::Result<KeyRotation> {
    let flags: BTreeMap<_, _> = [("data", data), ("store", store), ("config", config)]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
    Ok(open_keys(&Settings::read(Sources::from_process(flags)?)?).await?)
}

async fn check(keys: &KeyRotation) -> anyhow::Result<ExitCode> {
    let progress = |usage: &KeyUsage| eprintln!("{} requests checked", usage.requests);
    let usage = keys.check(progress).await?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} requests checked", usage.requests)?;
    let mut missing = usage.used.clone();
    for (place, (name, digest)) in keys.names().enumerate() {
        let used = missing.remove(name).unwrap_or_default();
        let encrypts = if place == 0 { ", encrypts" } else { "" };
        writeln!(out, "key \"{name}\" (digest {digest}{encrypts}): in use by {used} requests")?;
    }
    for (name, used) in missing {
        writeln!(out, "key \"{name}\" (missing in {}): in use by {used} requests", keys.source())?;
    }
    if usage.unsealed > 0 {
        writeln!(
            out,
            "{} requests have a failure message or callback URL that is not encrypted",
            usage.unsealed
        )?;
    }
    match usage.hash_keys.as_slice() {
        [] => writeln!(out, "idempotency keys are not hashed")?,
        names => {
            let opens = if usage.hash_key_opens { "can" } else { "cannot" };
            let names = names.join("\" and with \"");
            writeln!(
                out,
                "the key that idempotency keys are hashed with {opens} be decrypted: with \"{names}\""
            )?;
        }
    }
    if usage.is_complete() {
        writeln!(out, "everything can be decrypted")?;
        return Ok(ExitCode::SUCCESS);
    }
    if usage.unreadable > 0 {
        writeln!(out, "{} requests cannot be decrypted, such as", usage.unreadable)?;
        list(&mut out, &usage.examples)?;
    }
    Ok(ExitCode::FAILURE)
}

async fn rotate(keys: &KeyRotation, per_second: u32) -> anyhow::Result<ExitCode> {
    let name = keys.names().next().map_or("", |(name, _)| name).to_owned();
    let mut out = std::io::stdout();
    writeln!(out, "encrypting everything with the key \"{name}\"")?;
    let report = |progress: &RotationProgress| {
        let RotationProgress { pass, requests, resealed, .. } = progress;
        // Whoever reads the progress may have gone; the work goes on.
        let _ =
            writeln!(std::io::stdout(), "pass {pass}: {requests} requests read, {resealed} encrypted so far");
    };
    let progress = keys.rotate(per_second, report).await?;
    let RotationProgress { resealed, late, unreadable, examples, is_complete, .. } = progress;
    writeln!(out, "{resealed} requests encrypted with the key \"{name}\"")?;
    if is_complete {
        writeln!(out, "nothing is encrypted with another key")?;
        return Ok(ExitCode::SUCCESS);
    }
    if unreadable > 0 {
        writeln!(out, "{unreadable} requests cannot be decrypted, and stay as they are, such as")?;
        list(&mut out, &examples)?;
    } else {
        writeln!(
            out,
            "{late} requests were encrypted with another key meanwhile: put \"{name}\" first on all servers, restart them, and \
             run this again"
        )?;
    }
    Ok(ExitCode::FAILURE)
}

fn list(out: &mut impl Write, examples: &[(impl std::fmt::Display, String)]) -> std::io::Result<()> {
    examples.iter().try_for_each(|(id, reason)| writeln!(out, "  {id}: {reason}"))
}
