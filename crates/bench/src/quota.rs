//! `weir bench quota`: how many messages a second the gateway accepts, next to what an empty handler answers.
//!
//! Creates the users, loads `POST /api/send`, then sends the same bytes to the baseline.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::child::Server;
use crate::expect::Expect;
use crate::load::{Body, LoadOptions, Target, Template, configure, measure};
use crate::report::{Comparison, Report};
use crate::target::resolve;

const WINDOW_MINUTES: u32 = 1440;
/// Files a process needs next to its connections.
const SPARE_FILES: u64 = 64;

/// Arguments of `weir bench quota`.
#[derive(Debug, Clone, clap::Args)]
pub struct QuotaArgs {
    /// Server to load, as http://host:port; without it a private one is started and stopped
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Connections, each with one request in flight
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub connections: u16,
    /// Measured time, such as 500ms, 10s or 1m
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Time under load before measuring
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub warmup: Duration,
    /// Users to spread the messages over; 1 is one hot key
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub keys: u32,
    /// Requests per second over all connections (open loop); without it each response starts the next request
    #[arg(long, value_name = "R")]
    pub rate: Option<NonZeroU32>,
    /// Messages each user may send in a day
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2_147_483_647,
        value_parser = clap::value_parser!(u32).range(1..=2_147_483_647)
    )]
    pub limit: u32,
    /// Status to expect, as 2xx or a number; 429 with a --limit that the warm-up uses up measures refusals
    #[arg(long, value_name = "STATUS", default_value_t)]
    pub expect_status: Expect,
    /// Text of every message
    #[arg(long, value_name = "TEXT", default_value = "your parcel is on its way")]
    pub message: String,
    /// Threads of the load generator
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Measure an empty handler too (the default for a private server)
    #[arg(long, overrides_with = "no_baseline")]
    pub baseline: bool,
    /// Skip the empty handler
    #[arg(long)]
    pub no_baseline: bool,
    /// Allow a --url that is not on this machine
    #[arg(long)]
    pub allow_remote: bool,
}

impl QuotaArgs {
    fn load(&self) -> LoadOptions {
        LoadOptions {
            connections: usize::from(self.connections),
            threads: usize::from(self.threads),
            warmup: self.warmup,
            duration: self.duration,
            rate_per_s: self.rate,
            keys: u64::from(self.keys),
            expect: self.expect_status,
            ..LoadOptions::default()
        }
    }

    fn wants_baseline(&self) -> bool {
        self.baseline || (self.url.is_none() && !self.no_baseline)
    }
}

pub(crate) async fn run(args: QuotaArgs) -> Result<()> {
    ensure!(!args.duration.is_zero(), "--duration has to be longer than nothing");
    raise_file_limit(u64::from(args.connections))?;
    let mut notes = Vec::new();
    let (result, template) = match &args.url {
        Some(url) => load_server(&args, url).await?,
        None => load_private_server(&args, &mut notes).await?,
    };
    let baseline = if args.wants_baseline() { Some(load_baseline(&args, template).await?) } else { None };
    let answered = result.requests;
    Comparison::new(result, baseline, notes).print(args.json)?;
    ensure!(answered > 0, "no request was answered");
    Ok(())
}

async fn load_private_server(args: &QuotaArgs, notes: &mut Vec<String>) -> Result<(Report, Template)> {
    let server = Server::start_weir().await?;
    if server.is_on_tmpfs() {
        notes.push(
            "the private server wrote to memory (tmpfs), where an fsync is free; set TMPDIR to a disk"
                .to_owned(),
        );
    }
    let url = server.url.clone();
    let measured = load_server(args, &url).await;
    // A server that stops badly is worth saying, but not worth the measurement.
    if let Err(error) = server.stop().await {
        notes.push(format!("{error:#}"));
    }
    measured
}

async fn load_server(args: &QuotaArgs, url: &str) -> Result<(Report, Template)> {
    let (address, authority) = resolve(url, args.allow_remote).await?;
    let config = Template::post_json(&authority, "/api/config", &config_body(args.limit));
    let users = Target { name: "creating users".to_owned(), address, template: config };
    configure(&users, u64::from(args.keys)).await.context("create the users through POST /api/config")?;
    let template = Template::post_json(&authority, "/api/send", &send_body(&args.message)?);
    let target = Target { name: "weir quota".to_owned(), address, template: template.clone() };
    Ok((measure(&target, &args.load()).await?, template))
}

/// The same requests, to a handler that ignores them.
async fn load_baseline(args: &QuotaArgs, template: Template) -> Result<Report> {
    let server = Server::start_empty().await?;
    let (address, _) = resolve(&server.url, false).await?;
    let target = Target { name: "empty handler".to_owned(), address, template };
    // Whatever Weir is expected to answer, an empty handler says 200.
    let load = LoadOptions { expect: Expect::Success, ..args.load() };
    let report = measure(&target, &load).await?;
    server.stop().await.context("stop the empty handler")?;
    Ok(report)
}

fn config_body(limit: u32) -> Body {
    let after = format!(r#"","rateLimit":{limit},"timeWindow":{WINDOW_MINUTES}}}"#);
    Body { before: r#"{"userId":"bench-"#.to_owned(), after }
}

fn send_body(message: &str) -> Result<Body> {
    let message = serde_json::to_string(message).context("write the message as JSON")?;
    Ok(Body { before: r#"{"userId":"bench-"#.to_owned(), after: format!(r#"","message":{message}}}"#) })
}

/// Raises the limit on open files, for this process and the servers that it starts.
fn raise_file_limit(connections: u64) -> Result<()> {
    let needed = connections + SPARE_FILES;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|files| files >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|files| files < needed) {
        bail!(
            "--connections {connections} needs {needed} open files, and this user may have {}",
            maximum.unwrap_or(0)
        );
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })
        .context("raise the limit on open files")
}

/// `10s`, `500ms`, `1m`.
fn parse_duration(text: &str) -> Result<Duration> {
    let parsed: jiff::SignedDuration =
        text.parse().context("use a number and a unit, such as 500ms, 10s or 1m")?;
    Duration::try_from(parsed).context("a duration cannot be negative")
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        quota: QuotaArgs,
    }

    fn parse(args: &[&str]) -> Result<QuotaArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once(&"bench").chain(args)).map(|cli| cli.quota)
    }

    #[test]
    fn durations_have_a_number_and_a_unit() {
        let cases =
            [("10s", 10_000), ("500ms", 500), ("1m", 60_000), ("0s", 0), ("1.5s", 1500), ("1m 30s", 90_000)];
        for (text, ms) in cases {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for text in ["", "10", "s", "-1s", "ten seconds", "10 parsecs"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_defaults_are_one_hot_key_in_a_closed_loop() {
        let args = parse(&[]).unwrap();
        let load = args.load();
        assert_eq!((load.connections, load.threads, load.keys), (128, 1, 1));
        assert_eq!((load.warmup, load.duration), (Duration::from_secs(2), Duration::from_secs(10)));
        assert_eq!((load.rate_per_s, args.limit), (None, 2_147_483_647));
        assert_eq!(load.expect, Expect::Success);
    }

    #[test]
    fn a_load_of_refusals_can_be_asked_for() {
        let args = parse(&["--limit", "1", "--expect-status", "429"]).unwrap();
        assert_eq!((args.limit, args.load().expect), (1, Expect::Status(429)));
        assert!(parse(&["--expect-status", "often"]).is_err());
    }

    #[test]
    fn the_baseline_is_on_for_a_private_server_and_can_be_chosen() {
        let wants = |args: &[&str]| parse(args).unwrap().wants_baseline();
        assert!(wants(&[]));
        assert!(!wants(&["--no-baseline"]));
        assert!(!wants(&["--url", "http://localhost:1"]));
        assert!(wants(&["--url", "http://localhost:1", "--baseline"]));
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for args in [["--connections", "0"], ["--keys", "0"], ["--limit", "2147483648"], ["--rate", "0"]] {
            assert!(parse(&args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn bodies_are_json_whatever_the_message() {
        let body = send_body("a \"quoted\"\nline").unwrap();
        let text = format!("{}0000000042{}", body.before, body.after);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value, serde_json::json!({"userId": "bench-0000000042", "message": "a \"quoted\"\nline"}));
        let body = config_body(5);
        let value: serde_json::Value =
            serde_json::from_str(&format!("{}0000000042{}", body.before, body.after)).unwrap();
        let expected = serde_json::json!({"userId": "bench-0000000042", "rateLimit": 5, "timeWindow": 1440});
        assert_eq!(value, expected);
    }
}
