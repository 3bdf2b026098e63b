//! `weir health`: checks whether a server is ready, for containers and scripts without another client.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use weir_server::settings::Settings;
use weir_server::settings::source::Sources;

/// The timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct HealthArgs {
    /// The address of the server's HTTP API [env: WEIR_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Check only this capability: quota, slot, request, tier or sale
    #[arg(long, value_name = "NAME", value_parser = ["quota", "slot", "request", "tier", "sale"])]
    capability: Option<String>,
}

pub(crate) fn run(arguments: &HealthArgs) -> anyhow::Result<ExitCode> {
    let flags: BTreeMap<_, _> =
        arguments.listen.clone().map(|listen| ("listen", listen)).into_iter().collect();
    let settings = Settings::read(Sources::from_process(flags)?)?;
    let address = reachable(settings.process.listen);
    let response = get_readiness(address, arguments.capability.as_deref())
        .with_context(|| format!("cannot reach a server at {address}"))?;
    let ready = response.split(' ').nth(1) == Some("200");
    let body = response.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    anyhow::ensure!(ready, "the server at {address} is not ready: {body}");
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

fn get_readiness(address: SocketAddr, capability: Option<&str>) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let path = capability.map_or_else(|| "/readyz".to_owned(), |name| format!("/readyz/{name}"));
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut response = String::new();
    stream.take(64 * 1024).read_to_string(&mut response)?;
    Ok(response)
}
