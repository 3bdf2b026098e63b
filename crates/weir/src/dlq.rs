//! `weir dlq`: what could not be done, for operators: list it, look at one, let it start again, throw it away.

mod table;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use crate::client::Client;

/// Dead letters asked for at a time.
const PAGE: usize = 1_000;

#[derive(Debug, Subcommand)]
pub(crate) enum DlqCommand {
    /// List dead letters, the oldest first; with --json each with the first 1,024 characters of its payload
    List(ListArgs),
    /// Show one dead letter with its whole payload
    Show(OneArgs),
    /// Let one dead letter start again, or all of them
    Replay(ReplayArgs),
    /// Throw one dead letter away
    Discard(OneArgs),
}

/// Where the server is, and how the answer is shown.
#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct OperatorArgs {
    /// The server's HTTP API [env: WEIR_LISTEN] [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The server's data directory, where its admin key is unless WEIR_ADMIN_KEY is set [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// How many at most
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    limit: usize,
}

#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Which one, as `weir dlq list` names it
    id: String,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Which one, as `weir dlq list` names it
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    id: Option<String>,
    /// All there are
    #[arg(long)]
    all: bool,
}

pub(crate) fn run(command: DlqCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            DlqCommand::List(arguments) => list(&arguments).await,
            DlqCommand::Show(OneArgs { operator, id }) => show(&operator, &id).await,
            DlqCommand::Replay(ReplayArgs { operator, id, .. }) => replay(&operator, id.as_deref()).await,
            DlqCommand::Discard(OneArgs { operator, id }) => discard(&operator, &id).await,
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn list(arguments: &ListArgs) -> anyhow::Result<()> {
    let client = client(&arguments.operator)?;
    let (mut items, mut cursor) = (Vec::new(), None::<String>);
    while items.len() < arguments.limit {
        let limit = PAGE.min(arguments.limit - items.len());
        let after = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let page = ask(&client, Method::GET, &format!("/admin/dlq?limit={limit}{after}")).await?;
        items.extend(page["items"].as_array().cloned().unwrap_or_default());
        cursor = page["nextCursor"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    if arguments.operator.json {
        return print_json(&json!({"items": items, "nextCursor": cursor}));
    }
    let more = if cursor.is_some() { "; there are more (--limit)" } else { "" };
    let mut out = std::io::stdout();
    table::write(&mut out, &items)?;
    Ok(writeln!(out, "{} dead letters{more}", items.len())?)
}

async fn show(operator: &OperatorArgs, id: &str) -> anyhow::Result<()> {
    let letter = ask(&client(operator)?, Method::GET, &format!("/admin/dlq/{}", checked(id)?)).await?;
    if operator.json { print_json(&letter) } else { Ok(table::write_one(&mut std::io::stdout(), &letter)?) }
}

async fn replay(operator: &OperatorArgs, id: Option<&str>) -> anyhow::Result<()> {
    let path = match id {
        Some(id) => format!("/admin/dlq/{}/replay", checked(id)?),
        None => "/admin/dlq/replay".to_owned(),
    };
    let answer = ask(&client(operator)?, Method::POST, &path).await?;
    if operator.json {
        return print_json(&answer);
    }
    Ok(writeln!(std::io::stdout(), "{} replayed", answer["replayed"])?)
}

async fn discard(operator: &OperatorArgs, id: &str) -> anyhow::Result<()> {
    ask(&client(operator)?, Method::DELETE, &format!("/admin/dlq/{}", checked(id)?)).await?;
    if operator.json {
        return print_json(&json!({"discarded": 1}));
    }
    Ok(writeln!(std::io::stdout(), "1 discarded")?)
}

/// A client with the operator's key.
fn client(operator: &OperatorArgs) -> anyhow::Result<Client> {
    Client::of_operator(operator.url.as_deref(), operator.data.as_deref())
}

/// The answer, if it is a good one.
async fn ask(client: &Client, method: Method, path: &str) -> anyhow::Result<Value> {
    let (status, body) = client.call(method, path).await?;
    if body.is_empty() && status < 300 {
        return Ok(Value::Null);
    }
    let answer: Value = serde_json::from_slice(&body)
        .with_context(|| format!("the server answered {status} without JSON: is this Weir's address?"))?;
    anyhow::ensure!(status < 300, "{}", answer["message"].as_str().unwrap_or("the server refused"));
    Ok(answer)
}

/// An id that can stand in a path; no other is that of a dead letter.
fn checked(id: &str) -> anyhow::Result<&str> {
    let is_plain = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    anyhow::ensure!(is_plain, "{id:?} is no id of a dead letter: weir dlq list shows them");
    Ok(id)
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    serde_json::to_writer_pretty(&mut out, value)?;
    Ok(writeln!(out)?)
}
