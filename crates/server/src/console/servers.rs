//! All servers at once, as a Prometheus has them that scrapes them (`console.prometheus`). Of a server itself only its own
//! numbers are known.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use serde::Deserialize;
use url::Url;

use crate::outbound::{OutboundClient, OutboundLimits, OutboundTarget, Reach};
use crate::settings::console::ConsoleSettings;

const LIMITS: OutboundLimits = OutboundLimits {
    connect_timeout: Duration::from_secs(1),
    read_timeout: Duration::from_secs(5),
    body_max: 8 << 20,
    idle_max: 2,
};
/// Points of a range: what a chart can show.
const POINTS: i64 = 240;
/// The span that rates are means of.
const RATE_SECONDS: i64 = 60;
/// The most servers that are shown.
const SERVERS_MAX: usize = 200;

/// What is counted, as in the history of one server, and the counters that Prometheus has of it.
const SERIES: [(&str, &[&str]); 15] = [
    ("quota.allowed", &[r#"weir_quota_sends_total{outcome=~"accepted|replayed"}"#]),
    ("quota.denied", &[r#"weir_quota_sends_total{outcome=~"denied|denied_from_memory|key_conflict"}"#]),
    ("quota.failed", &[r#"weir_quota_sends_total{outcome="failed"}"#]),
    ("slot.allowed", &[r#"weir_slot_assignments_total{outcome=~"new|existing"}"#]),
    ("slot.denied", &[r#"weir_slot_assignments_total{outcome="exhausted"}"#]),
    ("slot.failed", &[r#"weir_slot_assignments_total{outcome="failed"}"#]),
    ("request.allowed", &[r#"weir_request_accept_total{outcome=~"accepted|replayed"}"#]),
    ("request.denied", &[r#"weir_request_accept_total{outcome=~"limited|conflict|switched_off"}"#]),
    ("request.failed", &[r#"weir_request_accept_total{outcome="failed"}"#]),
    (
        "tier.allowed",
        &[
            r#"weir_tier_calls_total{outcome=~"allowed|disabled"}"#,
            r#"weir_tier_checks_total{outcome="allowed"}"#,
        ],
    ),
    (
        "tier.denied",
        &[r#"weir_tier_calls_total{outcome=~"denied.*"}"#, r#"weir_tier_checks_total{outcome="denied"}"#],
    ),
    (
        "tier.failed",
        &[r#"weir_tier_calls_total{outcome="failed"}"#, r#"weir_tier_checks_total{outcome="failed"}"#],
    ),
    ("sale.allowed", &[r#"weir_sale_purchases_total{outcome="bought"}"#]),
    (
        "sale.denied",
        &[r#"weir_sale_purchases_total{outcome=~"already_purchased|sold_out|not_active|throttled"}"#],
    ),
    ("sale.failed", &[r#"weir_sale_purchases_total{outcome="failed"}"#]),
];

/// A span of time that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    QuarterHour,
    Day,
}

impl Range {
    const fn seconds(self) -> i64 {
        match self {
            Self::QuarterHour => 15 * 60,
            Self::Day => 24 * 3_600,
        }
    }
}

/// Why Prometheus has not answered.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ServersError {
    #[error("Prometheus does not answer (console.prometheus): {0}")]
    Unreachable(String),
    #[error("Prometheus answered {0} (console.prometheus)")]
    Refused(u16),
    #[error("the answer of Prometheus could not be read (console.prometheus)")]
    Unreadable,
}

/// Rates of all servers together, in columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ServersHistory {
    /// Seconds since 1970.
    pub(crate) times: Vec<i64>,
    /// Per second, by series; `None` where Prometheus has nothing.
    pub(crate) series: BTreeMap<String, Vec<Option<f64>>>,
}

/// One server, by the name under which Prometheus scrapes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ServerRates {
    pub(crate) allowed: f64,
    pub(crate) denied: f64,
    pub(crate) failed: f64,
    /// Engines that do not answer it.
    pub(crate) engines_down: Vec<String>,
}

/// Asks Prometheus.
#[derive(Clone, Debug)]
pub(crate) struct Servers {
    client: OutboundClient,
    url: Url,
}

impl Servers {
    /// `None` without `console.prometheus`.
    pub(crate) fn new(settings: &ConsoleSettings) -> Option<Self> {
        let url = settings.prometheus.clone()?;
        Some(Self { client: OutboundClient::new(Reach::Anywhere, LIMITS), url })
    }

    /// Rates of all servers together until `now`, in seconds since 1970.
    pub(crate) async fn history(&self, range: Range, now: i64) -> Result<ServersHistory, ServersError> {
        let step = (range.seconds() / POINTS).max(1);
        let (end, start) = (now - now % step, now - now % step - range.seconds());
        let parts = SERIES.map(|(name, counters)| named(name, &rate(counters, "", RATE_SECONDS.max(step))));
        let body = self
            .ask(
                "query_range",
                &[
                    ("query", parts.join(" or ")),
                    ("start", start.to_string()),
                    ("end", end.to_string()),
                    ("step", step.to_string()),
                ],
            )
            .await?;
        let times: Vec<i64> = (0..=range.seconds() / step).map(|n| start + n * step).collect();
        let mut series = BTreeMap::new();
        for result in read(&body)? {
            let Some(name) = result.metric.get("series").cloned() else { continue };
            let known: BTreeMap<i64, f64> = result.values.iter().filter_map(Point::read).collect();
            series.insert(name, times.iter().map(|time| known.get(time).copied()).collect());
        }
        Ok(ServersHistory { times, series })
    }

    /// Each server's rates now.
    pub(crate) async fn each(&self) -> Result<BTreeMap<String, ServerRates>, ServersError> {
        let all = |kind: &str| -> Vec<&str> {
            let of_kind = SERIES.iter().filter(|(name, _)| name.ends_with(kind));
            of_kind.flat_map(|(_, counters)| counters.iter().copied()).collect()
        };
        let rates = ["allowed", "denied", "failed"]
            .map(|kind| named(kind, &rate(&all(kind), "by (instance) ", RATE_SECONDS)));
        let query = format!("{} or {}", rates.join(" or "), named("down", "weir_engine_up == 0"));
        let body = self.ask("query", &[("query", query)]).await?;
        let mut servers: BTreeMap<String, ServerRates> = BTreeMap::new();
        for result in read(&body)? {
            let (Some(instance), Some(name)) = (result.metric.get("instance"), result.metric.get("series"))
            else {
                continue;
            };
            if servers.len() >= SERVERS_MAX && !servers.contains_key(instance) {
                continue;
            }
            let server = servers.entry(instance.clone()).or_default();
            let value = result.value.as_ref().and_then(Point::read).map_or(0.0, |(_, value)| value);
            match name.as_str() {
                "allowed" => server.allowed = value,
                "denied" => server.denied = value,
                "failed" => server.failed = value,
                _ => server.engines_down.extend(result.metric.get("engine").cloned()),
            }
        }
        Ok(servers)
    }

    async fn ask(&self, what: &str, parameters: &[(&str, String)]) -> Result<Bytes, ServersError> {
        let mut url = self.url.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.push(what);
        }
        url.query_pairs_mut().extend_pairs(parameters);
        let target = OutboundTarget::new(&url).ok_or(ServersError::Unreadable)?;
        let response = self.client.get(&target, HeaderMap::new()).await;
        let response = response.map_err(|error| ServersError::Unreachable(error.to_string()))?;
        if response.status.is_success() {
            Ok(response.body)
        } else {
            Err(ServersError::Refused(response.status.as_u16()))
        }
    }
}

/// The sum of the rates of some counters. A counter that is not there counts as 0 beside others.
fn rate(counters: &[&str], by: &str, seconds: i64) -> String {
    let one = |counter: &&str| format!("rate({counter}[{seconds}s])");
    match counters {
        [counter] => format!("sum {by}({})", one(counter)),
        // Counters with the same labels are told apart by their names, which rates do not have.
        _ => {
            let parts: Vec<_> =
                counters.iter().enumerate().map(|(n, counter)| numbered(n, &one(counter))).collect();
            format!("sum {by}({})", parts.join(" or "))
        }
    }
}

fn named(name: &str, expression: &str) -> String {
    format!(r#"label_replace({expression}, "series", "{name}", "", "")"#)
}

fn numbered(number: usize, expression: &str) -> String {
    format!(r#"label_replace({expression}, "part", "{number}", "", "")"#)
}

#[derive(Deserialize)]
struct Answer {
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<QueryResult>,
}

#[derive(Deserialize)]
struct QueryResult {
    metric: BTreeMap<String, String>,
    #[serde(default)]
    values: Vec<Point>,
    value: Option<Point>,
}

/// A time in seconds, and a number as text.
#[derive(Deserialize)]
struct Point(f64, String);

impl Point {
    fn read(&self) -> Option<(i64, f64)> {
        #[expect(clippy::cast_possible_truncation, reason = "seconds since 1970 are far below 2^53")]
        let time = self.0.round() as i64;
        let value = self.1.parse().ok().filter(|value: &f64| value.is_finite())?;
        Some((time, value))
    }
}

fn read(body: &[u8]) -> Result<Vec<QueryResult>, ServersError> {
    let answer: Answer = serde_json::from_slice(body).map_err(|_not_json| ServersError::Unreadable)?;
    Ok(answer.data.result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::live::COUNT_NAMES;

    #[test]
    fn all_servers_have_the_series_of_one() {
        assert_eq!(SERIES.map(|(name, _)| name), COUNT_NAMES[..SERIES.len()]);
    }

    #[test]
    fn several_counters_are_told_apart() {
        assert_eq!(rate(&["a"], "", 60), "sum (rate(a[60s]))");
        assert_eq!(
            rate(&["a", "b"], "by (instance) ", 60),
            r#"sum by (instance) (label_replace(rate(a[60s]), "part", "0", "", "") or label_replace(rate(b[60s]), "part", "1", "", ""))"#
        );
    }

    #[test]
    fn an_answer_is_read_point_by_point() {
        let body = br#"{"status":"success","data":{"resultType":"matrix","result":[
            {"metric":{"series":"quota.allowed"},"values":[[1000,"1.5"],[1060,"NaN"],[1120,"2"]]}]}}"#;
        let results = read(body).unwrap();
        let points: Vec<_> = results[0].values.iter().filter_map(Point::read).collect();
        assert_eq!(points, [(1_000, 1.5), (1_120, 2.0)]);
        assert!(matches!(read(b"<html>"), Err(ServersError::Unreadable)));
    }
}
