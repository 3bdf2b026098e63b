//! Holds the plans of all statements of hot paths to one rule: what they cost must not hang on what Postgres believes of a
//! table. A session keeps its plans, and a table that was empty when one was made may hold a million rows when it runs.
//!
//! A join of an array with a table that seems empty reads the table, and the whole array again for each of its rows. Three
//! forms have only one plan, a look-up for each element:
//!
//! - `CROSS JOIN LATERAL (SELECT … FROM t WHERE t.key = new.key OFFSET 0)`, where nothing is changed;
//! - `WHERE t.key = ANY(ARRAY[new.key])` in an update: a sorted reading of `t` is no use for it, as it would be for `=`, so
//!   all that is left besides the look-up is a sequential scan, which sessions have switched off;
//! - `t.ctid = …` of what such a `LATERAL` has found, for keys of several columns. Only for rows that nobody else may be
//!   changing: a version that is newer than the statement is not found.

use serde_json::Value;
use weir_testkit::postgres::Server;

use crate::{Postgres, queue, quota, request, sale, slot, tier};

/// Tables as they are at the start, as a vacuum leaves them when nothing is to be done, and with rows that Postgres knows of.
const STATES: [(&str, &str); 3] =
    [("never vacuumed", ""), ("vacuumed while empty", "VACUUM ANALYZE"), ("filled", FILL)];
const FILL: &str = "
    INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
    SELECT gen_random_uuid(), n % 10, 'payment', 'ACCEPTED', '', 'key', now(), now() FROM generate_series(1, 2000) AS n;
    INSERT INTO request_job (request_id, downstream, claimable_at) SELECT request_id, 'default', now() FROM request_record;
    INSERT INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
    SELECT tenant_id, request_id, '', request_id, now() FROM request_record;
    INSERT INTO rate_limit_store SELECT n, 1, 1, 0, now() FROM generate_series(1, 2000) AS n;
    ANALYZE";

/// What may: the books are read whole, and so are tables of a row or two; a topic has sixteen shards; a count is one row.
const EXCEPT: [&str; 8] = [
    "SELECT count(*) FROM rate_limit_store",
    "UPDATE quota_cache SET epoch",
    "$1::text IS NULL OR id = $1",
    "sum(discarded)",
    "SELECT topic, shard FROM queue_shard AS candidate",
    "SELECT count(*) FROM rate_limit_event_slot",
    "SELECT count(*) FROM products",
    "FROM counted WHERE p.id = $1",
];

#[tokio::test]
async fn no_plan_depends_on_how_full_a_table_seems() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("plans").await;
    let engine = Postgres::open(database.url().parse().expect("a Postgres URL"), 1).await.expect("it opens");
    let mut faults = Vec::new();
    for (state, prepare) in STATES {
        database.execute(prepare).await;
        for sql in statements().filter(|sql| !EXCEPT.iter().any(|part| sql.contains(part))) {
            let plan = explain(&engine, sql).await;
            if let Err(fault) = examine(&plan, false) {
                faults.push(format!("{state}: {fault}\n{sql}\n{plan:#}\n"));
            }
        }
    }
    assert!(faults.is_empty(), "{} plans:\n{}", faults.len(), faults.concat());
}

fn statements() -> impl Iterator<Item = &'static str> {
    let prepared = quota::SQL
        .into_iter()
        .chain(queue::sql())
        .chain(slot::sql())
        .chain(request::sql())
        .chain(sale::sql());
    prepared.chain(request::UPKEEP).chain(tier::BATCHES)
}

/// The plan that a session makes once and keeps, by a session with the settings of all.
async fn explain(engine: &Postgres, sql: &str) -> Value {
    let session = engine.inner.pool.session().await.expect("a session");
    let count = session.client.prepare(sql).await.expect("it can be prepared").params().len();
    let values = vec!["NULL"; count].join(", ");
    let values = if count == 0 { values } else { format!("({values})") };
    session.client.batch_execute(&format!("PREPARE examined AS {sql}")).await.expect("it can be prepared");
    let text = session.client.simple_query(&format!("EXPLAIN (FORMAT JSON) EXECUTE examined{values}")).await;
    let text = text.expect("it can be explained");
    let plan = text.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let plan: Value = serde_json::from_str(plan.expect("a plan")).expect("JSON");
    session.client.batch_execute("DEALLOCATE examined").await.expect("it can be forgotten");
    session.keep();
    plan[0]["Plan"].clone()
}

/// Nothing may be read whole but behind a limit, and nothing again for every row of something else unless through an index.
fn examine(plan: &Value, is_limited: bool) -> Result<(), String> {
    let is_limited = is_limited || plan["Node Type"] == "Limit";
    if reads_whole(plan) && !is_limited {
        return Err(format!("all of {} is read", plan["Relation Name"]));
    }
    let children = plan["Plans"].as_array().map(Vec::as_slice).unwrap_or_default();
    if plan["Node Type"] == "Nested Loop" {
        let again = first_read(&children[1]);
        if !is_lookup(again) {
            return Err(format!("{} is read again for every row", again["Node Type"]));
        }
    }
    children.iter().try_for_each(|child| examine(child, is_limited))
}

/// What a node begins by reading.
fn first_read(plan: &Value) -> &Value {
    match plan["Plans"].as_array().and_then(|children| children.first()) {
        Some(child) => first_read(child),
        None => plan,
    }
}

fn reads_whole(plan: &Value) -> bool {
    plan["Relation Name"].is_string()
        && plan["Node Type"].as_str().is_some_and(|node| node.ends_with("Scan"))
        && !is_lookup(plan)
}

fn is_lookup(plan: &Value) -> bool {
    plan["Index Cond"].is_string() || plan["TID Cond"].is_string()
}
