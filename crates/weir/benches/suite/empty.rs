//! The baseline of the embedded engine: an axum handler that does nothing, with the same request bytes.

use anyhow::{Context as _, Result};

use crate::process::{self, Process};
use crate::results::Row;
use crate::weir::{self, Load};
use crate::{Bench, HOT};

pub(crate) async fn measure(bench: &Bench) -> Result<Row> {
    let name = &bench.name("empty handler");
    eprintln!("measuring: {name}");
    let mut command = process::weir();
    command.args(["bench", "empty"]);
    let mut server = Process::spawn(command, &bench.path().join("empty"))?;
    let url = server.ready_url().await.context("start the empty handler")?;
    let row = Row::from_report(&weir::drive(bench, name, &url, Load::Accepted { keys: HOT }).await?);
    server.stop().await.context("stop the empty handler")?;
    Ok(row)
}
