//! throttlecrab over HTTP: a server that only decides token buckets in memory.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use weir_bench::{Body, Template};
use weir_testkit::http::Client;
use weir_testkit::wait;

use crate::gateway::{drive, options};
use crate::process::Process;
use crate::results::Row;
use crate::weir::HOST;
use crate::{Bench, SPREAD};

const VERSION: &str = "0.4.40";
const NAME: &str = "throttlecrab over HTTP";

/// Loads it with one bucket per call, spread over as many keys as the checks of Weir.
pub(crate) async fn measure(bench: &Bench, program: &Path) -> Result<Row> {
    eprintln!("measuring: {NAME}");
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = Command::new(program);
    command.args([
        "--http",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        &port.to_string(),
        "--log-level",
        "error",
    ]);
    let server = Process::spawn(command, &bench.path().join("throttlecrab"))?;
    let url = format!("http://127.0.0.1:{port}");
    let client = Client::new(&url);
    wait::until("throttlecrab answers", std::time::Duration::from_secs(10), async || {
        client.get("/health").await.is_ok_and(|response| response.status == 200)
    })
    .await;
    let body = Body {
        before: r#"{"key":"u"#.to_owned(),
        after: r#"","max_burst":1000000000,"count_per_period":1000000000,"period":60,"quantity":1}"#
            .to_owned(),
    };
    let template = Template::post_json(HOST, "/throttle", &body);
    let row = Row::from_report(&drive(NAME, &url, template, &options(bench, SPREAD)).await?);
    // It is ended by the signal; its exit code does not matter.
    drop(server);
    ensure!(row.failed == 0, "throttlecrab answered {} calls otherwise", row.failed);
    Ok(row)
}

/// Returns the program, which is compiled once and stored under target/.
pub(crate) fn install() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("throttlecrab-{VERSION}"));
    let program = root.join("bin/throttlecrab-server");
    if !program.exists() {
        eprintln!("installing throttlecrab-server {VERSION}, once: this takes some minutes");
        let status = Command::new(env!("CARGO"))
            .args(["install", "throttlecrab-server", "--version", VERSION, "--locked", "--root"])
            .arg(&root)
            .stdout(Stdio::null())
            .status()
            .context("run cargo install")?;
        ensure!(status.success(), "it could not be compiled (it needs protoc: Debian's protobuf-compiler)");
    }
    Ok(program)
}
