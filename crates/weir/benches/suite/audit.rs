//! Checks after a run whether the server did what its responses said. Without this, a rate means nothing.
//!
//! Every audit must balance, contain at least the counted 2xx responses (those of the warm-up come on top), and agree
//! with the users' own counts; and the sender must deliver everything. If messages go to Kafka there is no ledger of
//! them, so the server's metrics are used.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::time::sleep;
use weir_testkit::http::Client;

use crate::results::Sender;

const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// What the responses of a run promise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promises {
    pub(crate) users: u64,
    /// Messages with a 2xx response, without those of the warm-up.
    pub(crate) accepted: u64,
    /// Whether the store has a ledger of messages.
    pub(crate) has_ledger: bool,
    /// Whether a message is counted before it is queued, and stays counted if that fails.
    pub(crate) counts_first: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Audit {
    pub(crate) sender: Option<Sender>,
    pub(crate) failures: Vec<String>,
}

/// The result of one audit.
#[derive(Debug)]
struct Books {
    ok: bool,
    users: u64,
    accepted: u64,
    undelivered: u64,
    in_flight: u64,
    text: String,
}

/// Waits up to a minute for the sender, and checks every audit meanwhile.
pub(crate) async fn wait_and_audit(url: &str, admin_key: &str, promises: Promises) -> Audit {
    let client = Client::new(url).with_header("x-admin-key", admin_key);
    let mut audit = Audit::default();
    if let Err(error) = examine(&client, promises, &mut audit).await {
        audit.failures.push(format!("it could not be audited: {error:#}"));
    }
    audit
}

async fn examine(client: &Client, promises: Promises, audit: &mut Audit) -> Result<()> {
    let ended = Instant::now();
    let mut books = read_books(client, promises.has_ledger).await?;
    let backlog = books.in_flight;
    loop {
        ensure!(books.ok, "the books do not balance: {}", books.text);
        if books.in_flight == 0 || ended.elapsed() > CAUGHT_UP_WITHIN {
            break;
        }
        sleep(POLL).await;
        books = read_books(client, promises.has_ledger).await?;
    }
    let caught_up = books.in_flight == 0;
    audit.sender = Some(Sender { backlog, lag_s: ended.elapsed().as_secs_f64(), caught_up });
    let counted = sum_of_counts(client, promises.users).await?;
    let mut require = |holds: bool, what: String| {
        if !holds {
            audit.failures.push(what);
        }
    };
    let Books { accepted, users, undelivered, .. } = books;
    let Promises { users: keys, accepted: answered, has_ledger, counts_first } = promises;
    require(accepted >= answered, format!("{answered} answers were 2xx and only {accepted} accepted"));
    let exact = has_ledger && !counts_first;
    let agree = if exact { counted == accepted } else { counted >= accepted };
    require(agree, format!("{accepted} accepted, but the users' counts add up to {counted}"));
    require(users == keys, format!("{users} users instead of {keys}"));
    require(undelivered == 0, format!("{undelivered} messages were given up"));
    Ok(())
}

async fn read_books(client: &Client, has_ledger: bool) -> Result<Books> {
    let mut books = parse(&read_all(client).await?)?;
    if !has_ledger {
        let response = client.get("/metrics").await.context("GET /metrics")?;
        let metrics = String::from_utf8_lossy(&response.body);
        let counter = |name: &str, outcome: &str| counter(&metrics, name, outcome);
        books.accepted = counter("weir_quota_sends_total", "accepted")?;
        // Messages may be delivered more than once.
        let sent = counter("weir_quota_deliveries_total", "sent")?;
        books.in_flight = books.accepted.saturating_sub(sent);
        books.undelivered = counter("weir_quota_deliveries_total", "malformed")?;
    }
    Ok(books)
}

fn counter(metrics: &str, name: &str, outcome: &str) -> Result<u64> {
    let name = format!("{name}{{outcome=\"{outcome}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name));
    value.and_then(|value| value.parse().ok()).with_context(|| format!("GET /metrics has no {name}"))
}

/// Reads the whole audit. With a backlog the count may take longer than the API allows; the resulting 503 is retried.
pub(crate) async fn read_all(client: &Client) -> Result<Value> {
    let deadline = Instant::now() + CAUGHT_UP_WITHIN;
    loop {
        let response = client.get("/admin/audit").await.context("GET /admin/audit")?;
        if response.status == 200 {
            return Ok(response.json());
        }
        let may_retry = response.status == 503 && Instant::now() < deadline;
        ensure!(may_retry, "GET /admin/audit answered {}", response.status);
        sleep(POLL).await;
    }
}

fn parse(answer: &Value) -> Result<Books> {
    let quota = &answer["quota"];
    let number = |name: &str| {
        quota[name].as_u64().with_context(|| format!("GET /admin/audit has no quota.{name}: {answer}"))
    };
    Ok(Books {
        ok: answer["ok"].as_bool().unwrap_or(false),
        users: number("users")?,
        accepted: number("accepted")?,
        undelivered: number("discarded")? + number("dead")?,
        in_flight: number("inFlight")?,
        text: answer.to_string(),
    })
}

/// Adds up the counts of all users.
async fn sum_of_counts(client: &Client, keys: u64) -> Result<u64> {
    let mut sum = 0;
    for key in 0..keys {
        let path = format!("/api/config/bench-{key:010}");
        let response = client.get(&path).await.with_context(|| format!("GET {path}"))?;
        ensure!(response.status == 200, "GET {path} answered {}", response.status);
        sum += response.json()["currentCount"].as_u64().context("a configuration has a currentCount")?;
    }
    Ok(sum)
}
