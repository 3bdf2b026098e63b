//! Starts the services of `compose.yaml` as local processes and stops them at Ctrl-C: `make stack`.
#![expect(clippy::print_stdout, reason = "it tells what it does")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use weir_testkit::stack::Stack;

#[tokio::main]
async fn main() -> ExitCode {
    let Some(weir) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: weir-stack PATH_OF_WEIR");
        return ExitCode::from(2);
    };
    match run(&weir).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("weir-stack: {reason}");
            ExitCode::FAILURE
        }
    }
}

async fn run(weir: &Path) -> Result<(), String> {
    let explain = |error: std::io::Error| error.to_string();
    let mut interrupt = signal(SignalKind::interrupt()).map_err(explain)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(explain)?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let start = async {
        let mut stack = Stack::start(&root, weir, |line| println!("  {line}")).await?;
        let published = stack.publish().await?;
        Ok::<_, String>((stack, published))
    };
    println!("Starting the services of compose.yaml, each when those it needs are healthy:");
    let (stack, published) = tokio::select! {
        started = start => started?,
        // The services are stopped with the program.
        _ = interrupt.recv() => return Err("stopped while starting".to_owned()),
        _ = terminate.recv() => return Err("stopped while starting".to_owned()),
    };
    println!("\nThe stack is up (stop with Ctrl-C):");
    for (name, address) in published {
        println!("  {name:<11} http://{address}");
    }
    println!("  logs        {}", stack.directory().display());
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    println!("\nStopping");
    match &stack.stop().await[..] {
        [] => Ok(()),
        left => Err(format!("these processes are left: {left:?}")),
    }
}
