//! The addresses, the data directory and the roles of the process.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// `listen`: the address of the HTTP API.
    pub listen: SocketAddr,
    /// `grpc_listen`: the address of the gRPC API.
    pub grpc_listen: SocketAddr,
    /// `data`: the directory of the embedded engine and of generated secrets.
    pub data: PathBuf,
    /// `roles`.
    pub roles: Roles,
    /// `http.allowed_hosts`: names allowed in `Host`, besides those of this machine, while it listens on a loopback address.
    pub allowed_hosts: Vec<String>,
}

/// The roles of a process, in any combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Serves the API.
    pub api: bool,
    /// Carries out requests.
    pub worker: bool,
    /// Delivers messages.
    pub sender: bool,
    /// Repairs what crashes and outages have left half-done.
    pub reconciler: bool,
}

impl Roles {
    pub const ALL: Self = Self { api: true, worker: true, sender: true, reconciler: true };
    const NONE: Self = Self { api: false, worker: false, sender: false, reconciler: false };

    fn parse(text: &str) -> Option<Self> {
        let mut roles = Self::NONE;
        for name in text.split(',') {
            match name.trim() {
                "api" => roles.api = true,
                "worker" => roles.worker = true,
                "sender" => roles.sender = true,
                "reconciler" => roles.reconciler = true,
                _ => return None,
            }
        }
        Some(roles)
    }
}

impl ProcessSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let address = "an address such as 127.0.0.1:8080 or [::]:8080";
        let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        // `config` was read before all others, to find the file. Reading it again marks it as a known setting.
        reader.get_optional("config", path, "the path of a file")?;
        Ok(Self {
            listen: reader.get("listen", loopback(8080), parse_address, address)?,
            grpc_listen: reader.get("grpc_listen", loopback(8081), parse_address, address)?,
            data: reader.get("data", PathBuf::from("./data"), path, "a directory")?,
            roles: reader.get(
                "roles",
                Roles::ALL,
                Roles::parse,
                "a list of api, worker, sender, reconciler",
            )?,
            allowed_hosts: reader.get(
                "http.allowed_hosts",
                Vec::new(),
                parse_hosts,
                "a list of host names without ports such as weir.example.com, or *",
            )?,
        })
    }

    /// Whether only this machine can reach the HTTP API.
    #[must_use]
    pub fn is_on_loopback(&self) -> bool {
        is_loopback(self.listen)
    }
}

/// Parses a list of names without ports into lower case. `*` stands for any name.
fn parse_hosts(text: &str) -> Option<Vec<String>> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(|name| (name == "*" || name.bytes().all(is_plain)).then(|| name.to_ascii_lowercase())).collect()
}

/// Parses an address, or a host name that resolves to one.
fn parse_address(text: &str) -> Option<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    std::net::ToSocketAddrs::to_socket_addrs(text).ok()?.next()
}

/// Whether only this machine can reach an address.
pub(crate) fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}
