//! The services of `compose.yaml` as local processes, for machines without Docker and for a test of that file.
//!
//! Commands, variables, mounts, dependencies and health checks are those of the file. Each service has an address of its own in
//! 127.0.0.0/8 instead of a host name, so ports are those of the file, too; names, `0.0.0.0` and paths in a container are
//! replaced. What runs instead of an image is in `native`: real servers, but no limits on memory and no isolation.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use self::compose::{Compose, Service};
use self::native::Native;
use crate::instance::run_blocking;
use crate::proxy::Proxy;

pub mod compose;
mod native;
mod process;

/// How long a service may take until its health check succeeds.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(90);
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// The running stack. Services are stopped when this value is dropped or this program ends.
pub struct Stack {
    /// In the order in which they were started.
    services: Vec<(String, Native)>,
    network: Network,
    compose: Compose,
    published: Vec<Proxy>,
    directory: TempDir,
}

/// The addresses of services: 127.a.b.1 and so on.
struct Network {
    prefix: [u8; 3],
    addresses: BTreeMap<String, Ipv4Addr>,
    /// Marks the addresses as used by this process.
    _guard: UdpSocket,
}

/// What a service's texts are translated with.
struct Localizer<'a> {
    network: &'a Network,
    own: Ipv4Addr,
    /// Paths in the container and here, the longest first.
    paths: Vec<(String, PathBuf)>,
}

impl Stack {
    /// Starts the stack of the repository at `root` with this `weir`, each service when those it needs are healthy. `report` is
    /// called with a line for each.
    pub async fn start(root: &Path, weir: &Path, report: fn(&str)) -> Result<Self, String> {
        let (root, weir) = (absolute(root)?, absolute(weir)?);
        run_blocking(move || Self::start_blocking(&root, &weir, report)).await
    }

    fn start_blocking(root: &Path, weir: &Path, report: fn(&str)) -> Result<Self, String> {
        let file = compose::environment_file(&root.join("deploy/.env"));
        let variable = |name: &str| std::env::var(name).ok().or_else(|| file.get(name).cloned());
        let compose = Compose::read(root, &variable)?;
        let network = Network::take(compose.services.keys());
        let directory = tempfile::Builder::new().prefix("weir-stack-").tempdir();
        let directory = directory.map_err(|error| format!("cannot create a directory: {error}"))?;
        let mut stack = Self { services: Vec::new(), network, compose, published: Vec::new(), directory };
        for name in stack.order()? {
            let Some(kind) = native::Kind::of(&stack.compose.services[&name].image) else {
                report(&format!("{name}: left out, it runs only in a container"));
                continue;
            };
            let since = Instant::now();
            let native = stack.start_service(kind, &name, weir)?;
            stack.services.push((name.clone(), native));
            report(&format!("{name}: healthy after {:.1} s", since.elapsed().as_secs_f64()));
        }
        Ok(stack)
    }

    /// The services without a profile, each after those that it needs.
    fn order(&self) -> Result<Vec<String>, String> {
        let mut waiting: Vec<&String> = self
            .compose
            .services
            .iter()
            .filter(|(_, service)| service.profiles.is_empty())
            .map(|(name, _)| name)
            .collect();
        let mut order: Vec<String> = Vec::new();
        while !waiting.is_empty() {
            let ready = |name: &&String| {
                self.compose.services[*name].depends_on.keys().all(|needed| order.contains(needed))
            };
            let position = waiting.iter().position(ready);
            let position = position.ok_or_else(|| format!("services wait for each other: {waiting:?}"))?;
            order.push(waiting.remove(position).clone());
        }
        Ok(order)
    }

    fn start_service(&self, kind: native::Kind, name: &str, weir: &Path) -> Result<Native, String> {
        let service = &self.compose.services[name];
        let own = self.network.addresses[name];
        let directory = self.directory.path().join(name);
        fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let mut localizer = Localizer { network: &self.network, own, paths: Vec::new() };
        self.mount(service, &directory, &mut localizer)?;
        let mut environment = kind.image_environment(&self.compose.directory)?;
        environment.extend(service.environment());
        for value in environment.values_mut() {
            *value = localizer.translate(value);
        }
        let command: Vec<String> = service.command.iter().map(|word| localizer.translate(word)).collect();
        let spec = native::Spec { name, own, directory: &directory, environment, command, weir };
        let mut native = kind.start(&spec, &localizer)?;
        let check = service.healthcheck.as_ref().ok_or_else(|| format!("{name} has no health check"))?;
        // In a container 127.0.0.1 is the service itself.
        let test: Vec<String> = check
            .test
            .iter()
            .map(|word| localizer.translate(word).replace("127.0.0.1", &own.to_string()))
            .collect();
        wait_until_healthy(&spec, &mut native, &test)?;
        Ok(native)
    }

    /// Creates volumes and copies mounted files, translated.
    fn mount(
        &self,
        service: &Service,
        directory: &Path,
        localizer: &mut Localizer<'_>,
    ) -> Result<(), String> {
        for volume in &service.volumes {
            let mut parts = volume.split(':');
            let (Some(source), Some(target)) = (parts.next(), parts.next()) else {
                return Err(format!("not a volume: {volume}"));
            };
            let here = if self.compose.volumes.contains_key(source) {
                let here = self.directory.path().join("volumes").join(source);
                fs::create_dir_all(&here).map_err(|error| format!("{}: {error}", here.display()))?;
                here
            } else {
                let file = self.compose.directory.join(source);
                let text =
                    fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
                let here = directory.join(Path::new(target).file_name().unwrap_or_default());
                fs::write(&here, localizer.translate(&text))
                    .map_err(|error| format!("{}: {error}", here.display()))?;
                here
            };
            localizer.paths.push((target.to_owned(), here));
        }
        localizer.paths.sort_by_key(|(target, _)| std::cmp::Reverse(target.len()));
        Ok(())
    }

    /// Forwards the ports that the file publishes on this machine. Returns them with the names of their services.
    pub async fn publish(&mut self) -> Result<Vec<(String, SocketAddr)>, String> {
        let mut published = Vec::new();
        for (name, _) in &self.services {
            for port in &self.compose.services[name].ports {
                let (here, there) = port.rsplit_once(':').ok_or_else(|| format!("not a port: {port}"))?;
                let here: SocketAddr = here.parse().map_err(|error| format!("{name}: {here}: {error}"))?;
                let there: u16 = there.parse().map_err(|error| format!("{name}: {there}: {error}"))?;
                let proxy = Proxy::listen(here, self.address(name, there)).await;
                self.published.push(proxy.map_err(|error| format!("{name}: {here}: {error}"))?);
                published.push((name.clone(), here));
            }
        }
        Ok(published)
    }

    pub fn address(&self, service: &str, port: u16) -> SocketAddr {
        SocketAddr::from((self.network.addresses[service], port))
    }

    /// Where the services have their logs and data.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What the compose files say.
    pub fn compose(&self) -> &Compose {
        &self.compose
    }

    /// The services that run, in the order in which they were started.
    pub fn running(&self) -> Vec<&str> {
        self.services.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The log of a service so far.
    pub fn log(&self, service: &str) -> String {
        self.services
            .iter()
            .find(|(name, _)| name == service)
            .map(|(_, native)| native.log())
            .unwrap_or_default()
    }

    /// The command lines of the processes that have an address or a file of the stack in them, or in their variables.
    pub fn processes(&self) -> Vec<String> {
        let [a, b, c] = self.network.prefix;
        let marks = [format!("{a}.{b}.{c}."), self.directory.path().display().to_string()];
        processes_with(&marks)
    }

    /// Stops all services, the last started first. Returns the processes that are left, which must be none.
    pub async fn stop(mut self) -> Vec<String> {
        run_blocking(move || {
            self.published.clear();
            while let Some((_, native)) = self.services.pop() {
                drop(native);
            }
            self.processes()
        })
        .await
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // Fields are dropped in the order of their declaration, and services first to last.
        while let Some((_, native)) = self.services.pop() {
            drop(native);
        }
    }
}

fn processes_with(marks: &[String]) -> Vec<String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let [command, variables] =
            ["cmdline", "environ"].map(|name| String::from_utf8_lossy(&read(name)).replace('\0', " "));
        marks.iter().any(|mark| command.contains(mark) || variables.contains(mark)).then_some(command)
    });
    processes.collect()
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    fs::canonicalize(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn wait_until_healthy(spec: &native::Spec<'_>, native: &mut Native, test: &[String]) -> Result<(), String> {
    let end = Instant::now() + HEALTHY_TIMEOUT;
    loop {
        let problem = match native.check(spec, test) {
            Ok(()) => return Ok(()),
            Err(problem) => problem,
        };
        if native.has_exited() {
            return Err(format!("{} exited before it was healthy; its log:\n{}", spec.name, native.log()));
        }
        if Instant::now() > end {
            let log = native.log();
            return Err(format!("{} is not healthy ({problem}); its log:\n{log}", spec.name));
        }
        std::thread::sleep(CHECK_EVERY);
    }
}

impl Network {
    /// Takes addresses that no other process has taken.
    fn take<'a>(services: impl Iterator<Item = &'a String>) -> Self {
        loop {
            let prefix = [127, fastrand::u8(1..=250), fastrand::u8(..)];
            let [a, b, c] = prefix;
            let Ok(guard) = UdpSocket::bind((Ipv4Addr::new(a, b, c, 254), 9)) else { continue };
            let addresses = (1..).zip(services).map(|(n, name)| (name.clone(), Ipv4Addr::new(a, b, c, n)));
            return Self { prefix, addresses: addresses.collect(), _guard: guard };
        }
    }
}

impl Localizer<'_> {
    /// Replaces what means something else in a container.
    fn translate(&self, text: &str) -> String {
        let mut text = text.replace("0.0.0.0:", &format!("{}:", self.own));
        for (name, address) in &self.network.addresses {
            text = replace_host(&text, name, &address.to_string());
        }
        replace_paths(&text, &self.paths)
    }
}

/// Replaces paths in a container, unless they are a part of another path.
fn replace_paths(text: &str, paths: &[(String, PathBuf)]) -> String {
    let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let starts = !rest[..at].ends_with(is_path);
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let found = paths.iter().find(|(container, _)| {
            let after = rest.strip_prefix(container.as_str());
            starts && after.is_some_and(|after| after.starts_with('/') || !after.starts_with(is_path))
        });
        if let Some((container, here)) = found {
            out.push_str(&here.display().to_string());
            rest = &rest[container.len()..];
        }
        // The rest of this path.
        let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out + rest
}

/// Replaces `name:` before a port, unless `name` is the end of another word.
fn replace_host(text: &str, name: &str, address: &str) -> String {
    let pattern = format!("{name}:");
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(&pattern) {
        let (before, after) = (&rest[..at], &rest[at + pattern.len()..]);
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_host = after.starts_with(|c: char| c.is_ascii_digit()) && !before.ends_with(is_word);
        out.push_str(before);
        out.push_str(if is_host { address } else { name });
        out.push(':');
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_host_names_before_a_port_are_replaced() {
        for (text, expected) in [
            ("postgres://weir:p@postgres:5432/weir", "postgres://weir:p@127.1.1.1:5432/weir"),
            ("1@postgres:9093", "1@127.1.1.1:9093"),
            ("my-postgres:5432 postgres: 5", "my-postgres:5432 postgres: 5"),
            ("[postgres:80, postgres:81]", "[127.1.1.1:80, 127.1.1.1:81]"),
        ] {
            assert_eq!(replace_host(text, "postgres", "127.1.1.1"), expected);
        }
    }

    #[test]
    fn only_whole_paths_are_replaced_and_each_once() {
        let paths = [("/etc/x/x.yml", "/tmp/x/x.yml"), ("/data", "/tmp/data"), ("/x", "/tmp/x")];
        let paths = paths.map(|(container, here)| (container.to_owned(), PathBuf::from(here)));
        for (text, expected) in [
            ("--config=/etc/x/x.yml --store=/x", "--config=/tmp/x/x.yml --store=/tmp/x"),
            ("/data", "/tmp/data"),
            ("/data/file /database http://h/data", "/tmp/data/file /database http://h/data"),
        ] {
            assert_eq!(replace_paths(text, &paths), expected);
        }
    }
}
