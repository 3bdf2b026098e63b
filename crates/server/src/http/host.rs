//! Checks the header `Host`: it must be there once and, while the server listens on a loopback address, name this machine.
//!
//! A server that only this machine can reach often requires no credentials. A web page opened on this machine could have its
//! own name resolve to 127.0.0.1 and then read the server's responses (DNS rebinding). The browser sends that name in `Host`.

use std::net::{Ipv4Addr, Ipv6Addr};

use http::header::HOST;
use http::{Request, Version};

use super::error::ApiError;
use crate::settings::process::ProcessSettings;

/// The names by which callers may address the server.
#[derive(Clone, Debug)]
pub(crate) struct HostCheck {
    /// Names allowed besides those of this machine; `None` if every name is allowed.
    allowed: Option<Vec<String>>,
}

impl HostCheck {
    pub(crate) fn new(process: &ProcessSettings) -> Self {
        let is_any_allowed =
            !process.is_on_loopback() || process.allowed_hosts.iter().any(|host| host == "*");
        Self { allowed: (!is_any_allowed).then(|| process.allowed_hosts.clone()) }
    }

    /// Fails when the header is missing or doubled, or names another machine.
    pub(crate) fn check<B>(&self, request: &Request<B>) -> Result<(), ApiError> {
        let mut hosts = request.headers().get_all(HOST).iter();
        let host = match (hosts.next(), hosts.next()) {
            (Some(host), None) => host.as_bytes(),
            // HTTP/1.0 does not require the header.
            (None, _) if request.version() == Version::HTTP_10 => return Ok(()),
            (None, _) => return Err(ApiError::invalid_field("Host", "is required")),
            (Some(_), Some(_)) => return Err(ApiError::invalid_field("Host", "is there more than once")),
        };
        let Some(allowed) = &self.allowed else { return Ok(()) };
        // A request line with an absolute URL names a host as well.
        let in_request_line = request.uri().authority().map(|authority| authority.as_str().as_bytes());
        if [Some(host), in_request_line].into_iter().flatten().all(|host| is_local(host, allowed)) {
            return Ok(());
        }
        let problem = "must be localhost or a loopback address, because the server listens on this machine alone; \
                       the setting http.allowed_hosts (WEIR_HTTP_ALLOWED_HOSTS) allows more names";
        Err(ApiError::invalid_field("Host", problem))
    }
}

/// Whether a host, with or without a port, is this machine or one of the allowed names.
fn is_local(host: &[u8], allowed: &[String]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    if let Some(rest) = host.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else { return false };
        let is_loopback = |address: Ipv6Addr| address.to_canonical().is_loopback();
        return (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
            && address.parse().is_ok_and(is_loopback);
    }
    let name = match host.split_once(':') {
        Some((name, port)) if is_port(port) => name,
        Some(_) => return false,
        None => host,
    };
    if name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback()) {
        return true;
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_localhost = |name: &str| name.eq_ignore_ascii_case("localhost");
    is_localhost(name)
        || name.rsplit_once('.').is_some_and(|(_, last)| is_localhost(last))
        || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_distinguished_from_others() {
        let allowed = ["weir.example.com".to_owned()];
        for local in [
            "localhost",
            "LocalHost:8080",
            "localhost.",
            "weir.localhost:1",
            "127.0.0.1",
            "127.9.8.7:80",
            "[::1]",
            "[::1]:8080",
            "[::ffff:127.0.0.1]:1",
            "weir.example.com",
            "Weir.Example.Com:443",
        ] {
            assert!(is_local(local.as_bytes(), &allowed), "{local}");
        }
        for foreign in [
            "",
            "example.com",
            "weir.example.com.evil.example",
            "evil-weir.example.com",
            "localhost.evil.example",
            "notlocalhost",
            "127.0.0.1.evil.example",
            "128.0.0.1",
            "10.0.0.1:80",
            "0.0.0.0",
            "[::2]",
            "[::1",
            "[::1]evil.example",
            "::1",
            "localhost:80:80",
            "localhost@evil.example",
            "user@localhost",
        ] {
            assert!(!is_local(foreign.as_bytes(), &allowed), "{foreign}");
        }
    }
}
