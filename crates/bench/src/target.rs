//! Resolves the URL of a target: only plain HTTP, and only this machine unless remote targets are allowed.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::net::{TcpStream, lookup_host};
use url::Url;

/// The first reachable address of `http://host:port` and the authority for the `Host` header.
///
/// Refuses addresses of other machines unless `allow_remote`.
pub async fn resolve(url: &str, allow_remote: bool) -> Result<(SocketAddr, String)> {
    let (host, port) = parse(url)?;
    let authority = format!("{host}:{port}");
    let found = lookup_host(&authority).await.with_context(|| format!("resolve {host}"))?;
    let addresses: Vec<SocketAddr> = found.collect();
    if !allow_remote {
        addresses.iter().try_for_each(|address| refuse_remote(*address))?;
    }
    // A name may stand for ::1 and 127.0.0.1 while the server listens on one of them.
    let mut failure = None;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(_) => return Ok((address, authority)),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error).with_context(|| format!("connect to {url}")),
        None => bail!("{host} has no address"),
    }
}

fn parse(url: &str) -> Result<(String, u16)> {
    let parsed = Url::parse(url).with_context(|| format!("{url} is not a URL; use http://host:port"))?;
    let plain = parsed.scheme() == "http" && parsed.path() == "/" && parsed.query().is_none();
    ensure!(plain, "{url} is not supported: the generator speaks plain HTTP to http://host:port");
    let host = parsed.host_str().with_context(|| format!("{url} names no host"))?;
    Ok((host.to_owned(), parsed.port_or_known_default().unwrap_or(80)))
}

fn refuse_remote(address: SocketAddr) -> Result<()> {
    ensure!(
        address.ip().to_canonical().is_loopback(),
        "refusing to load {address}: it is not a loopback address, and a load test against a machine that is not \
         yours is an attack; pass --allow-remote if it is yours"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_gives_host_and_port() {
        assert_eq!(parse("http://127.0.0.1:8080").unwrap(), ("127.0.0.1".to_owned(), 8080));
        assert_eq!(parse("http://localhost/").unwrap(), ("localhost".to_owned(), 80));
        assert_eq!(parse("http://[::1]:9").unwrap(), ("[::1]".to_owned(), 9));
    }

    #[test]
    fn other_schemes_and_paths_are_refused() {
        for url in ["https://localhost", "http://localhost/api", "localhost:8080", "", "http://h/?a=b"] {
            assert!(parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn only_loopback_is_allowed_by_default() {
        for address in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            refuse_remote(address.parse().unwrap()).unwrap();
        }
        for address in ["10.0.0.1:1", "192.0.2.7:80", "[2001:db8::1]:80", "0.0.0.0:1"] {
            let refusal = refuse_remote(address.parse().unwrap()).unwrap_err().to_string();
            assert!(refusal.contains("--allow-remote"), "{refusal}");
        }
    }
}
