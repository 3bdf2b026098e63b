//! `weir dlq`: lists, shows, replays and discards dead letters.

mod table;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use crate::client::{Client, TlsArgs};

/// Dead letters per page.
const PAGE: usize = 1_000;

#[derive(Debug, Subcommand)]
pub(crate) enum DlqCommand {
    /// List dead letters, oldest first; with --json each with the first 1,024 characters of its payload
    List(ListArgs),
    /// Show one dead letter with its whole payload
    Show(SingleArgs),
    /// Replay one dead letter, those that match a filter, or all of them
    Replay(ReplayArgs),
    /// Discard one dead letter
    Discard(SingleArgs),
}

/// The options of all subcommands.
#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct OperatorArgs {
    /// The server's HTTP API [env: WEIR_LISTEN] [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The server's data directory, where its admin key is unless WEIR_ADMIN_KEY is set [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// The maximum number
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    limit: usize,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Which dead letters: those that have all that is given.
#[derive(Debug, Args)]
#[group(id = "filter", multiple = true)]
pub(crate) struct FilterArgs {
    /// Only this topic, such as sms-outbound; requests for requests
    #[arg(long)]
    topic: Option<String>,
    /// Only requests of this tenant, and their webhooks
    #[arg(long)]
    tenant: Option<String>,
    /// Only requests of this type, and their webhooks
    #[arg(long = "type", value_name = "TYPE")]
    request_type: Option<String>,
    /// Only requests with this failure code, and messages with this in their reason
    #[arg(long)]
    error: Option<String>,
    /// Only those that died at this time or later, such as 2026-06-01T12:00:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only those that died before this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
}

impl FilterArgs {
    /// The names and values of the filters that are set.
    fn filters(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { topic, tenant, request_type, error, since, until } = self;
        let all = [
            ("topic", topic),
            ("tenant", tenant),
            ("type", request_type),
            ("error", error),
            ("since", since),
            ("until", until),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }
}

#[derive(Debug, Args)]
pub(crate) struct SingleArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Its id, as printed by `weir dlq list`
    id: String,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Its id, as printed by `weir dlq list`
    #[arg(required_unless_present_any = ["all", "filter"], conflicts_with_all = ["all", "filter", "dry_run"])]
    id: Option<String>,
    /// Replay all dead letters
    #[arg(long, conflicts_with = "filter")]
    all: bool,
    #[command(flatten)]
    filter: FilterArgs,
    /// Only count those that would be replayed
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(command: DlqCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            DlqCommand::List(arguments) => list(&arguments).await,
            DlqCommand::Show(SingleArgs { operator, id }) => show(&operator, &id).await,
            DlqCommand::Replay(ReplayArgs { operator, id: Some(id), .. }) => replay(&operator, &id).await,
            DlqCommand::Replay(arguments) => replay_many(&arguments).await,
            DlqCommand::Discard(SingleArgs { operator, id }) => discard(&operator, &id).await,
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
        let filter = query(&arguments.filter);
        let page =
            call_api(&client, Method::GET, &format!("/admin/dlq?limit={limit}{after}{filter}")).await?;
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
    let letter =
        call_api(&client(operator)?, Method::GET, &format!("/admin/dlq/{}", checked_id(id)?)).await?;
    if operator.json { print_json(&letter) } else { Ok(table::write_one(&mut std::io::stdout(), &letter)?) }
}

async fn replay(operator: &OperatorArgs, id: &str) -> anyhow::Result<()> {
    let path = format!("/admin/dlq/{}/replay", checked_id(id)?);
    let response = call_api(&client(operator)?, Method::POST, &path).await?;
    if operator.json {
        return print_json(&response);
    }
    Ok(writeln!(std::io::stdout(), "{} replayed", response["replayed"])?)
}

async fn replay_many(arguments: &ReplayArgs) -> anyhow::Result<()> {
    let mut body: serde_json::Map<String, Value> =
        arguments.filter.filters().map(|(name, value)| (name.to_owned(), json!(value))).collect();
    body.insert("dryRun".to_owned(), json!(arguments.dry_run));
    let body = serde_json::to_vec(&body)?.into();
    let client = client(&arguments.operator)?;
    let (status, body) = client.post("/admin/dlq/replay", "application/json", body).await?;
    let response = parse_response(status, &body)?;
    if arguments.operator.json {
        return print_json(&response);
    }
    let mut out = std::io::stdout();
    if arguments.dry_run {
        return Ok(writeln!(out, "{} match; nothing was replayed (--dry-run)", response["matched"])?);
    }
    Ok(writeln!(out, "{} replayed", response["replayed"])?)
}

/// The filter as further parameters of a query.
fn query(filter: &FilterArgs) -> String {
    let parameter =
        |(name, value): (&str, &str)| format!("&{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC));
    filter.filters().map(parameter).collect()
}

async fn discard(operator: &OperatorArgs, id: &str) -> anyhow::Result<()> {
    call_api(&client(operator)?, Method::DELETE, &format!("/admin/dlq/{}", checked_id(id)?)).await?;
    if operator.json {
        return print_json(&json!({"discarded": 1}));
    }
    Ok(writeln!(std::io::stdout(), "1 discarded")?)
}

fn client(operator: &OperatorArgs) -> anyhow::Result<Client> {
    Client::for_operator(operator.url.as_deref(), operator.data.as_deref(), &operator.tls)
}

/// Calls the API and returns the JSON, or an error with the server's message.
async fn call_api(client: &Client, method: Method, path: &str) -> anyhow::Result<Value> {
    let (status, body) = client.call(method, path).await?;
    parse_response(status, &body)
}

fn parse_response(status: u16, body: &[u8]) -> anyhow::Result<Value> {
    if body.is_empty() && status < 300 {
        return Ok(Value::Null);
    }
    let response: Value = serde_json::from_slice(body).with_context(|| {
        format!("the server responded {status} without JSON; is this the address of Weir?")
    })?;
    anyhow::ensure!(
        status < 300,
        "{}",
        response["message"].as_str().unwrap_or("the server rejected the call")
    );
    Ok(response)
}

/// Validates an id for use in a path; no other text is the id of a dead letter.
fn checked_id(id: &str) -> anyhow::Result<&str> {
    let is_plain = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    anyhow::ensure!(is_plain, "{id:?} is not the id of a dead letter; `weir dlq list` shows them");
    Ok(id)
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    serde_json::to_writer_pretty(&mut out, value)?;
    Ok(writeln!(out)?)
}
