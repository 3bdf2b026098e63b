//! What runs instead of an image: the same program from this machine, found or installed as for other tests.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

use super::process::Process;
use super::{Localizer, compose};
use crate::postgres::Server;
use crate::{kafka, nginx, promtool, redis};

/// The images that can be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Weir,
    Postgres,
    Redis,
    Kafka,
    Nginx,
    Prometheus,
}

/// What a service is started with, translated.
pub(super) struct Spec<'a> {
    pub(super) name: &'a str,
    pub(super) own: Ipv4Addr,
    pub(super) directory: &'a Path,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) command: Vec<String>,
    pub(super) weir: &'a Path,
}

/// A running service.
pub(super) enum Native {
    Process(Process),
    Postgres(Box<Server>),
    /// The health check of the image runs a tool that is not among the jars of tests.
    Kafka(Process, SocketAddr),
}

impl Kind {
    pub(super) fn of(image: &str) -> Option<Self> {
        let (name, _) = image.split_once(':').unwrap_or((image, ""));
        Some(match name {
            "weir" => Self::Weir,
            "postgres" => Self::Postgres,
            "redis" => Self::Redis,
            "apache/kafka" => Self::Kafka,
            "nginx" => Self::Nginx,
            "prom/prometheus" => Self::Prometheus,
            _ => return None,
        })
    }

    /// The variables that the image sets.
    pub(super) fn image_environment(self, deploy: &Path) -> Result<BTreeMap<String, String>, String> {
        if self != Self::Weir {
            return Ok(BTreeMap::new());
        }
        let file = deploy.join("Dockerfile");
        let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut environment = compose::image_environment(&text);
        // The addresses of containers are not loopback, so their endpoints require credentials.
        environment.insert("WEIR_ALLOW_ANONYMOUS".to_owned(), "false".to_owned());
        Ok(environment)
    }

    pub(super) fn start(self, spec: &Spec<'_>, localizer: &Localizer<'_>) -> Result<Native, String> {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let here = |container: &str| {
            let path = localizer.paths.iter().find(|(target, _)| target == container);
            path.map(|(_, here)| here.display().to_string())
                .ok_or_else(|| format!("{} has nothing mounted at {container}", spec.name))
        };
        let run = |program: &Path, arguments: &[String]| {
            Process::start(spec.name, program, arguments, &spec.environment, spec.directory)
        };
        match self {
            Self::Weir => run(spec.weir, &words(&["serve"])).map(Native::Process),
            Self::Postgres => postgres(spec).map(|server| Native::Postgres(Box::new(server))),
            Self::Redis => {
                let (program, arguments) = (redis::program()?, spec.command.get(1..).unwrap_or_default());
                let more = words(&["--bind", &spec.own.to_string(), "--dir", &here("/data")?]);
                run(&program, &[arguments, &more].concat()).map(Native::Process)
            }
            Self::Kafka => {
                let (program, arguments) = kafka::command(&spec.environment, spec.directory)?;
                let process = run(&program, &arguments)?;
                Ok(Native::Kafka(process, SocketAddr::from((spec.own, 9092))))
            }
            Self::Nginx => {
                let global = format!("daemon off; pid {}/nginx.pid;", spec.directory.display());
                let config = here("/etc/nginx/nginx.conf")?;
                run(&nginx()?, &words(&["-e", "stderr", "-c", &config, "-g", &global])).map(Native::Process)
            }
            Self::Prometheus => {
                let program = promtool()?.with_file_name("prometheus");
                run(&program, &spec.command).map(Native::Process)
            }
        }
    }
}

/// Starts a server with the user, the password and the database of the image's variables.
fn postgres(spec: &Spec<'_>) -> Result<Server, String> {
    let variable = |name: &str| {
        spec.environment.get(name).cloned().ok_or_else(|| format!("{} lacks the variable {name}", spec.name))
    };
    let (user, password, database) =
        (variable("POSTGRES_USER")?, variable("POSTGRES_PASSWORD")?, variable("POSTGRES_DB")?);
    let server = Server::at(spec.own, 5432)?;
    server.execute_blocking(&format!("CREATE ROLE {user} SUPERUSER LOGIN PASSWORD '{password}'"))?;
    server.execute_blocking(&format!("CREATE DATABASE {database} OWNER {user}"))?;
    Ok(server)
}

impl Native {
    pub(super) fn has_exited(&mut self) -> bool {
        match self {
            Self::Process(process) | Self::Kafka(process, _) => process.has_exited(),
            Self::Postgres(_) => false,
        }
    }

    pub(super) fn log(&self) -> String {
        match self {
            Self::Process(process) | Self::Kafka(process, _) => process.log(),
            Self::Postgres(server) => server.log(),
        }
    }

    /// Runs the health check. The error says how it failed.
    pub(super) fn check(&self, spec: &Spec<'_>, test: &[String]) -> Result<(), String> {
        if let Self::Kafka(_, address) = self {
            return kafka::answers(*address);
        }
        let (kind, words) = test.split_first().ok_or("the health check is empty")?;
        let (program, arguments) = match (kind.as_str(), words) {
            ("CMD", [program, arguments @ ..]) => (program.as_str(), arguments.to_vec()),
            ("CMD-SHELL", [line]) => ("sh", vec!["-c".to_owned(), line.clone()]),
            _ => return Err(format!("neither CMD nor CMD-SHELL: {test:?}")),
        };
        let output = Command::new(program)
            .args(arguments)
            .envs(&spec.environment)
            .env("PATH", self.path(spec))
            .current_dir(spec.directory)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run {program}: {error}"))?;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim().to_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{program}: {text}")) }
    }

    /// PATH with the programs of the service first.
    fn path(&self, spec: &Spec<'_>) -> std::ffi::OsString {
        let own = match self {
            Self::Postgres(server) => server.bin_dir(),
            _ => spec.weir.parent().map(Path::to_owned),
        };
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let directories = own.into_iter().chain(std::env::split_paths(&inherited));
        std::env::join_paths(directories).unwrap_or(inherited)
    }
}
