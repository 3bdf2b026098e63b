//! The audit of stores that are too large to be read while a caller waits, recounts, and the list of tables.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::wait::until;

use crate::fixtures::{Running, Store, audit, configure, message, on_each_engine, wait_until_delivered};

const OPERATIONS: &str = include_str!("../../../../docs/operations.md");

/// Changes rows in SQL, behind the server's back.
async fn edit(running: &Running, sql: &str) {
    match &running.database {
        Some(database) => database.execute(sql).await,
        None => {
            let file = rusqlite::Connection::open(running.weir.data_dir().join("weir.db")).unwrap();
            file.busy_timeout(Duration::from_secs(60)).unwrap();
            file.execute_batch(sql).unwrap();
        }
    }
}

/// Recounts, and returns the audit after it.
async fn recount(operator: &Client) -> Value {
    let before = audit(operator).await["recount"]["startedAt"].clone();
    let begun = operator.get("/admin/audit?full=true").await.unwrap();
    assert_eq!(begun.status, 200, "{:?}", begun.body);
    until("all rows are read", Duration::from_secs(60), async || {
        audit(operator).await["recount"]["startedAt"] != before
    })
    .await;
    audit(operator).await
}

async fn a_large_store_is_audited_by_counts_and_recounts(store: Store) {
    let running = Running::start_with(store, &[("WEIR_AUDIT_ROWS_MAX", "0")]).await;
    let (client, operator) = (running.client(), running.operator());
    configure(&client, "u", 10, 60).await;
    for n in 0..3 {
        let sent = client.post("/api/send", &message("u", &n.to_string())).await.unwrap();
        assert_eq!(sent.status, 200, "{:?}", sent.body);
    }
    let config = json!({"configName": "default", "maxPerWindow": 2, "windowSize": "PT4S"});
    assert_eq!(operator.post("/admin/rate-limit/config", &config).await.unwrap().status, 200);
    for n in 0..5 {
        let event = json!({"eventId": format!("e{n}"), "configName": "default", "requestedTime": "2026-06-01T12:00:00Z"});
        assert_eq!(client.post("/api/v1/slots", &event).await.unwrap().status, 201);
    }
    wait_until_delivered(&operator).await;
    let books = audit(&operator).await;
    assert_eq!((&books["ok"], &books["ofRows"]), (&json!(true), &json!(false)), "{books}");
    let quota = ["users", "accepted", "done", "inFlight", "difference"].map(|name| &books["quota"][name]);
    assert_eq!(quota, [1, 3, 3, 0, 0].map(Value::from).each_ref(), "{books}");
    assert_eq!((&books["slot"]["slots"], &books["slot"]["counted"]), (&json!(5), &json!(5)), "{books}");
    let books = recount(&operator).await;
    assert_eq!((&books["ok"], &books["recount"]["differences"]), (&json!(true), &json!([])), "{books}");
    assert!(books["recount"]["ageSeconds"].as_u64().unwrap() < 3_600, "{books}");

    // A counter that one slot more is in than there is, and a count of rows that is wrong.
    edit(&running, "UPDATE rate_limit_window_counter SET slot_count = 2 WHERE slot_count = 1").await;
    let books = audit(&operator).await;
    assert_eq!((&books["ok"], &books["slot"]["counted"]), (&json!(false), &json!(6)), "at once: {books}");
    edit(
        &running,
        "INSERT INTO row_count (table_name, kind, amount) VALUES ('dead_letter', 'sms-outbound', 1)",
    )
    .await;
    let books = recount(&operator).await;
    assert_eq!((&books["ok"], &books["quota"]["difference"]), (&json!(false), &json!(-1)), "{books}");
    let differences = books["recount"]["differences"].as_array().unwrap();
    assert_eq!(differences[0], "rows: dead_letter sms-outbound: 0 found, 1 counted", "{books}");
    assert!(differences[1].as_str().unwrap().starts_with("slot: default "), "{books}");
    assert_eq!(books["slot"]["different"].as_array().unwrap().len(), 1, "{books}");
    assert_eq!(operator.get("/admin/audit?full=perhaps").await.unwrap().status, 400);
}

async fn a_small_store_is_audited_by_its_rows(store: Store) {
    let running = Running::start(store).await;
    let operator = running.operator();
    let books = audit(&operator).await;
    assert_eq!((&books["ok"], &books["ofRows"]), (&json!(true), &json!(true)), "{books}");
    edit(&running, "INSERT INTO row_count (table_name, kind, amount) VALUES ('purchases', '7', 1)").await;
    let books = recount(&operator).await;
    let found = json!(["rows: purchases 7: 0 found, 1 counted"]);
    assert_eq!((&books["ok"], &books["recount"]["differences"]), (&json!(true), &found), "{books}");
}

/// The tables that docs/operations.md says this engine has.
fn documented(engine: &str) -> BTreeSet<String> {
    let rows = OPERATIONS.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.map(|row| row.split('|').map(|cell| cell.trim().trim_matches('`')).collect::<Vec<_>>());
    let tables = cells.filter(|cells| cells.len() > 3 && ["both", engine].contains(&cells[1]));
    tables
        .inspect(|cells| {
            assert!(!cells[2].is_empty() && !cells[3].is_empty(), "say what bounds {}", cells[0])
        })
        .map(|cells| cells[0].to_owned())
        .collect()
}

async fn every_table_is_listed_with_what_bounds_it(store: Store) {
    let running = Running::start(store).await;
    let (engine, tables): (&str, BTreeSet<String>) = match &running.database {
        Some(database) => {
            let tables =
                database.query_strings("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").await;
            ("Postgres", tables.into_iter().map(|mut row| row.remove(0).unwrap()).collect())
        }
        None => {
            let file = rusqlite::Connection::open(running.weir.data_dir().join("weir.db")).unwrap();
            let sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
            let mut statement = file.prepare(sql).unwrap();
            let names = statement.query_map([], |row| row.get(0)).unwrap();
            ("SQLite", names.collect::<Result<_, _>>().unwrap())
        }
    };
    let documented = documented(engine);
    let missing: Vec<_> = tables.difference(&documented).collect();
    let gone: Vec<_> = documented.difference(&tables).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "not in docs/operations.md: {missing:?}; not in {engine}: {gone:?}"
    );
}

on_each_engine!(
    a_large_store_is_audited_by_counts_and_recounts,
    a_small_store_is_audited_by_its_rows,
    every_table_is_listed_with_what_bounds_it,
);
