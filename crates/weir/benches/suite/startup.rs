//! The memory of an idle server, and the time from start to ready.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::ChildStdout;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::Bench;
use crate::SPREAD;
use crate::process::Process;
use crate::weir::{Engines, Load, data, serve};

const STARTS: usize = 10;
const LIMIT: Duration = Duration::from_secs(30);

/// Memory is sampled at this interval until it has not changed for `STABLE_SAMPLES` samples, but at least for `SETTLE`.
const SAMPLE: Duration = Duration::from_millis(100);
const STABLE_SAMPLES: usize = 10;
const SETTLE: Duration = Duration::from_secs(2);

/// Measures the resident memory of a server without calls.
pub(crate) async fn idle_memory_mb(scratch: &Path) -> Result<f64> {
    eprintln!("measuring: idle memory");
    let directory = scratch.join("idle");
    let mut server = Process::spawn(serve(&directory.join("data"), Engines::EMBEDDED), &directory)?;
    server.ready_url().await.context("start weir")?;
    let resident_kb = timeout(LIMIT, stable_kb(server.id())).await.context("memory kept changing")??;
    server.stop().await.context("stop weir")?;
    Ok(resident_kb as f64 * 1024.0 / 1e6)
}

async fn stable_kb(process: u32) -> Result<u64> {
    let ready = Instant::now();
    let (mut last, mut same) = (0, 0);
    loop {
        let now = resident_kb(process)?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
        if same >= STABLE_SAMPLES && ready.elapsed() >= SETTLE {
            return Ok(now);
        }
        sleep(SAMPLE).await;
    }
}

pub(crate) fn resident_kb(process: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).context("read a process's status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.context("a process's status has a VmRSS")
}

/// Measures starts on a fresh directory, and on an existing one: that of the run over many users, if there is one.
pub(crate) async fn start_times(bench: &Bench) -> Result<Vec<(&'static str, f64)>> {
    eprintln!("measuring: start to ready");
    let used = data(bench, Engines::EMBEDDED, Load::Accepted { keys: SPREAD });
    let (name, existing) = if used.exists() {
        ("directory with 10,000 users", used)
    } else {
        let existing = bench.path().join("existing").join("data");
        time_to_ready(&existing).await?;
        ("existing directory", existing)
    };
    let mut on_existing = Vec::new();
    let mut on_fresh = Vec::new();
    for start in 0..STARTS {
        on_existing.push(time_to_ready(&existing).await?);
        on_fresh.push(time_to_ready(&bench.path().join(format!("fresh-{start}")).join("data")).await?);
    }
    Ok(vec![("fresh directory", median_ms(on_fresh)), (name, median_ms(on_existing))])
}

fn median_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    (times[(times.len() - 1) / 2] + times[times.len() / 2]).as_secs_f64() * 500.0
}

/// Measures from just before the start of the process until its ready line is read from a pipe.
async fn time_to_ready(data: &Path) -> Result<Duration> {
    let command = serve(data, Engines::EMBEDDED);
    let directory = data.parent().unwrap_or(data);
    let started = Instant::now();
    let (server, stdout) = Process::spawn_piped(command, directory)?;
    let ready = timeout(LIMIT, when_ready(stdout)).await.context("weir was not ready in time")?;
    let took =
        ready.with_context(|| format!("weir ended before it was ready: {}", server.output()))? - started;
    server.stop().await.context("stop weir")?;
    Ok(took)
}

/// Reads to the end on its own thread, so that the server never waits for its reader.
fn when_ready(stdout: ChildStdout) -> oneshot::Receiver<Instant> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut sender = Some(sender);
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if line.contains("weir ready")
                && let Some(sender) = sender.take()
            {
                let _ = sender.send(Instant::now());
            }
        }
    });
    receiver
}
