//! Assignments while another session holds windows.

use std::time::Duration;

use weir_store::slot::{AssignOutcome, SlotStore};
use weir_store_conformance::slot::fixtures::{
    assignment, assignments, at, event, expect_books, pace, put_config,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasSlots};
use weir_store_postgres::Postgres;
use weir_testkit::postgres::Database;
use weir_testkit::wait;

use crate::fixtures::PostgresFixture;

/// The lock that every server takes before it changes a window of `default`.
const SHARE_CONFIG: &str = "SELECT pg_advisory_xact_lock_shared(hashtextextended('weir slot default', 0))";
const HOLD: &str = "SELECT * FROM rate_limit_window_counter WHERE status = 'OPEN' FOR UPDATE";
const WAITING: &str = "SELECT 1 FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE datname = current_database() AND NOT granted";

/// Opens an engine with a config of one event per window, whose first window is full and the next three open.
async fn open_windows() -> PostgresFixture {
    let h = PostgresFixture::open().await;
    put_config(&h, pace(1, 1_000)).await;
    h.slots().assign_batch(assignments("first", 4, at(0)).into()).await.expect("assign_batch must succeed");
    for n in 1..4 {
        h.slots().release_slot(&event(&format!("first-{n}"))).await.expect("an answer");
    }
    h
}

async fn open_engine(database: &Database, connections: usize, call_timeout: Duration) -> Postgres {
    let target: weir_store_postgres::PostgresTarget = database.url().parse().expect("a Postgres URL");
    Postgres::open(target.with_call_timeout(call_timeout), connections)
        .await
        .expect("it opens")
        .with_headroom(2)
}

async fn wait_for_blocked_session(database: &Database) {
    wait::until("somebody waits", ENGINE_TIMEOUT, async || !database.query_strings(WAITING).await.is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_waits_for_windows_that_others_hold_and_uses_the_first_one() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_windows().await;
    let holder = h.database.connect().await.expect("a session");
    holder.batch_execute(&format!("BEGIN; {SHARE_CONFIG}; {HOLD}")).await.expect("the windows are locked");
    let engine = open_engine(&h.database, 2, ENGINE_TIMEOUT).await;
    let assign = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.assign_batch(vec![assignment("second", at(0))].into()).await })
    };
    wait_for_blocked_session(&h.database).await;
    holder.batch_execute("COMMIT").await.expect("the locks are released");
    let outcomes = assign.await.expect("no panic").expect("assign_batch must succeed");
    assert!(
        matches!(&outcomes[..], [AssignOutcome::New(slot)] if slot.window_start == at(1_000)),
        "{outcomes:?}"
    );
    expect_books(&h, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_calls_hold_no_connections() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_windows().await;
    let holder = h.database.connect().await.expect("a session");
    holder.batch_execute(&format!("BEGIN; {SHARE_CONFIG}; {HOLD}")).await.expect("the windows are locked");
    let engine = open_engine(&h.database, 2, ENGINE_TIMEOUT).await;
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..6 {
        let engine = engine.clone();
        calls.spawn(
            async move { engine.assign_batch(vec![assignment(&format!("w-{n}"), at(0))].into()).await },
        );
    }
    wait_for_blocked_session(&h.database).await;
    let found = engine.find_slot(&event("first-0")).await.expect("there is a connection for it");
    assert!(found.is_some());
    assert_eq!(calls.try_join_next().map(|_| ()), None, "they still wait");
    holder.batch_execute("COMMIT").await.expect("the locks are released");
    for outcomes in calls.join_all().await {
        let outcomes = outcomes.expect("assign_batch must succeed");
        assert!(matches!(outcomes[..], [AssignOutcome::New(_)]), "{outcomes:?}");
    }
    expect_books(&h, 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_that_are_held_too_long_are_an_outage_and_not_full() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_windows().await;
    let engine = open_engine(&h.database, 2, Duration::from_millis(1_000)).await;
    let holder = h.database.connect().await.expect("a session");
    // First like a server that hangs, then like an operator: without the lock on the config.
    for hold in [format!("{SHARE_CONFIG}; {HOLD}"), HOLD.to_owned()] {
        holder.batch_execute(&format!("BEGIN; {hold}")).await.expect("the windows are locked");
        let outcome = engine.assign_batch(vec![assignment("second", at(0))].into()).await;
        assert!(matches!(outcome, Err(weir_store::Error::NotDone { .. })), "{outcome:?}");
        holder.batch_execute("ROLLBACK").await.expect("the locks are released");
    }
    expect_books(&h, 1).await;
}
