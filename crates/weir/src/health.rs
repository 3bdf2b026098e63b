//! `weir health`: checks whether a server is ready, for containers and scripts without another client.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use http::Method;
use weir_server::outbound::Trust;
use weir_server::settings::Settings;
use weir_server::settings::source::Sources;

use crate::client::{Client, TlsArgs};

/// How long the server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(4);

#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct HealthArgs {
    /// The address of the server's HTTP API [env: WEIR_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Check only this capability: quota, slot, request, tier or sale
    #[arg(long, value_name = "NAME", value_parser = ["quota", "slot", "request", "tier", "sale"])]
    capability: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

pub(crate) fn run(arguments: &HealthArgs) -> anyhow::Result<ExitCode> {
    let flags: BTreeMap<_, _> =
        arguments.listen.clone().map(|listen| ("listen", listen)).into_iter().collect();
    let settings = Settings::read(Sources::from_process(flags)?)?;
    let address = reachable(settings.process.listen);
    // Nothing secret is sent, and a certificate that has just been renewed must not look like an outage.
    let client = Client::for_settings(&settings, &arguments.tls, Trust::Anyone);
    let path = match &arguments.capability {
        Some(capability) => format!("/readyz/{capability}"),
        None => "/readyz".to_owned(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let response = runtime.block_on(async {
        let response = tokio::time::timeout(TIMEOUT, client.call(Method::GET, &path)).await;
        response.unwrap_or_else(|_elapsed| Err(anyhow::anyhow!("no answer within {TIMEOUT:?}")))
    });
    let (status, body) = response.with_context(|| format!("cannot reach a server at {address}"))?;
    anyhow::ensure!(
        status == 200,
        "the server at {address} is not ready: {}",
        String::from_utf8_lossy(&body)
    );
    writeln!(std::io::stdout(), "ready on {address}")?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the address to connect to: a server that listens on all interfaces is reached on localhost.
pub(crate) fn reachable(mut listen: SocketAddr) -> SocketAddr {
    match listen {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => listen.set_ip(Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => listen.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listen
}
