//! Spans by OTLP, from a call to what it leads to: at a collector that is there, away, or does not answer.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::otlp::{Collector, ReceivedSpan};
use weir_testkit::proxy::Proxy;
use weir_testkit::raw_connection::Listener;
use weir_testkit::wait;

use crate::fixtures::{Running, Store, TEST_TIMEOUT, configure, message, on_each_engine, operator, weir};
use crate::trace::{answer_next, traced};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b7-00";

/// Waits until the collector has spans of these names in a trace, and returns all of the trace.
async fn spans_named(collector: &Collector, trace: &str, names: &[&str]) -> Vec<ReceivedSpan> {
    let mut spans = Vec::new();
    wait::until(&format!("the collector has {names:?}"), TEST_TIMEOUT, async || {
        spans = collector.spans_of(trace);
        names.iter().all(|name| spans.iter().any(|span| span.name == *name))
    })
    .await;
    spans
}

fn named<'a>(spans: &'a [ReceivedSpan], name: &str) -> &'a ReceivedSpan {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("{name} is not among {spans:#?}"));
    assert!(found.next().is_none(), "{name} is there once: {spans:#?}");
    span
}

fn attribute<'a>(span: &'a ReceivedSpan, name: &str) -> Option<&'a str> {
    span.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

async fn one_trace_leads_from_the_call_to_the_webhook(store: Store) {
    let collector = Collector::start().await;
    let (mut downstream, mut receiver) = (Listener::start().await, Listener::start().await);
    let settings = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url()),
        // Traces of callers are recorded as they ask for it.
        ("WEIR_TRACES_SAMPLE_RATIO", "0".to_owned()),
        ("WEIR_DOWNSTREAM", downstream.url()),
        ("WEIR_REQUEST_WEBHOOK_ALLOW_PRIVATE", "true".to_owned()),
        ("WEIR_REQUEST_READ_TIMEOUT", "10s".to_owned()),
    ];
    let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let running = Running::start_with(store, &settings).await;
    let submission = json!({
        "idempotencyKey": "k", "requestType": "pay", "payload": {"card": "4111-secret"}, "callbackUrl": receiver.url(),
    });
    let caller = traced(&running.weir).with_header("traceparent", SAMPLED);
    let accepted = caller.post("/v1/requests", &submission).await.unwrap();
    assert_eq!(accepted.status, 202, "{:?}", accepted.body);
    let called = answer_next(&mut downstream, "200 Done").await;
    let told = answer_next(&mut receiver, "204 Fine").await;
    let http = "POST /v1/requests";
    let names = [http, "lane request wait", "lane request batch", "downstream", "webhook"];
    let spans = spans_named(&collector, TRACE, &names).await;

    let root = named(&spans, http);
    assert_eq!((root.parent.as_str(), root.kind, root.service.as_str()), (CALLER, 2, "weir"));
    assert_eq!(attribute(root, "http.response.status_code"), Some("202"));
    assert_eq!(attribute(root, "weir.http_request_id"), accepted.header("x-request-id"));
    for name in &names[1..] {
        assert_eq!(named(&spans, name).parent, root.id, "{name}: {spans:#?}");
    }
    let batch = named(&spans, "lane request batch");
    let engine = spans.iter().filter(|span| span.parent == batch.id);
    let engine: Vec<&str> = engine.map(|span| span.name.as_str()).collect();
    assert!(
        engine.iter().any(|name| name.starts_with("postgresql ") || name.starts_with("sqlite ")),
        "{spans:#?}"
    );
    // The header names the span that the collector has, so that what the receiver records goes below it.
    for (head, name) in [(&called, "downstream"), (&told, "webhook")] {
        let header = head.get("traceparent").unwrap();
        assert_eq!(header, format!("00-{TRACE}-{}-01", named(&spans, name).id), "{name}");
        assert_eq!(named(&spans, name).kind, 3);
    }
    assert!(spans.iter().all(|span| span.nanos.0 <= span.nanos.1 && !span.is_error), "{spans:#?}");
    assert!(!format!("{spans:?}").contains("4111"), "nothing that callers send");
}

on_each_engine!(one_trace_leads_from_the_call_to_the_webhook);

#[tokio::test]
async fn a_batch_is_linked_to_all_sampled_calls_in_it_and_unsampled_calls_leave_no_span() {
    let collector = Collector::start().await;
    let settings = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector.url()), ("WEIR_TRACES_SAMPLE_RATIO", "0")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    configure(&running.operator(), "u", 1_000_000, 60).await;
    let client = Client::new(running.weir.base_url());
    let sampled = |n: usize| format!("00-{n:032x}-00f067aa0ba902b7-01");
    // Concurrent sends of one user share batches sooner or later.
    let (mut sent, mut linked) = (1, None);
    while linked.is_none() {
        let calls = (sent..sent + 50).map(|n| {
            let client = client.clone().with_header("traceparent", &sampled(n));
            tokio::spawn(async move { client.post("/api/send", &message("u", "m")).await.unwrap().status })
        });
        for call in calls.collect::<Vec<_>>() {
            assert_eq!(call.await.unwrap(), 200);
        }
        sent += 50;
        let last = format!("{:032x}", sent - 1);
        spans_named(&collector, &last, &["POST /api/send"]).await;
        let all = collector.spans();
        linked = all.iter().find(|span| span.name == "lane quota batch" && !span.links.is_empty()).cloned();
    }
    let (batch, all) = (linked.unwrap(), collector.spans());
    for link in &batch.links {
        let call = all.iter().find(|span| span.id == *link).expect("the call is there");
        assert_eq!(call.name, "POST /api/send");
        assert_ne!(call.trace, batch.trace, "a call of its own trace");
    }
    let unsampled = client.with_header("traceparent", UNSAMPLED);
    assert_eq!(unsampled.post("/api/send", &message("u", "m")).await.unwrap().status, 200);
    let later = Client::new(running.weir.base_url()).with_header("traceparent", &sampled(sent));
    assert_eq!(later.post("/api/send", &message("u", "m")).await.unwrap().status, 200);
    spans_named(&collector, &format!("{sent:032x}"), &["POST /api/send"]).await;
    assert_eq!(collector.spans_of("4bf92f3577b34da6a3ce929d0e0e4737"), []);
}

#[tokio::test]
async fn a_collector_that_is_away_or_silent_delays_neither_answers_nor_a_stop() {
    for fault in [Proxy::refuse as fn(&Proxy), Proxy::black_hole] {
        let collector = Collector::start().await;
        fault(collector.network());
        let mut weir = weir()
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
            .env("WEIR_TRACES_SAMPLE_RATIO", "1")
            .spawn()
            .await;
        let client = operator(&weir);
        configure(&client, "u", 1_000_000, 60).await;
        // More spans than the queue holds. Every call is answered in its time.
        for _ in 0..100 {
            let calls = (0..50).map(|_| {
                let client = client.clone();
                tokio::spawn(
                    async move { client.post("/api/send", &message("u", "m")).await.unwrap().status },
                )
            });
            for call in calls.collect::<Vec<_>>() {
                assert_eq!(call.await.unwrap(), 200);
            }
        }
        wait::until("lost spans are counted", TEST_TIMEOUT, async || {
            let answer = client.request(Method::GET, "/metrics", &[], "").await.unwrap();
            let shown = String::from_utf8(answer.body.to_vec()).unwrap();
            let lost = shown.lines().filter(|line| line.starts_with("weir_trace_spans_total"));
            lost.filter(|line| !line.contains("exported")).any(|line| !line.ends_with(" 0"))
        })
        .await;
        let stopping = Instant::now();
        weir.terminate();
        assert!(weir.wait(TEST_TIMEOUT).await.success());
        // Far below what the collector is given for an answer, and far above what a stop takes.
        assert!(stopping.elapsed() < Duration::from_secs(4), "{:?}", stopping.elapsed());
    }
}

#[tokio::test]
async fn a_slow_collector_gets_its_spans() {
    let collector = Collector::start().await;
    collector.network().delay(Duration::from_millis(300));
    let settings = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector.url()), ("WEIR_TRACES_SAMPLE_RATIO", "0")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let caller = running.operator().with_header("traceparent", SAMPLED);
    assert_eq!(caller.get("/admin/policies").await.unwrap().status, 200);
    let spans = spans_named(&collector, TRACE, &["GET /admin/policies"]).await;
    assert_eq!(named(&spans, "GET /admin/policies").parent, CALLER);
}
