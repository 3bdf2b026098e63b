//! Rows that are lost or forged, and databases of before the counts. Rows are written in SQL, as an older server or an operator
//! does.

use weir_store::book::{BookStore, Books};
use weir_testkit::postgres::{Database, Server};

use crate::Postgres;

const INSERT_REQUESTS: &str = "
    WITH inserted AS (
        INSERT INTO request_record
            (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
        SELECT gen_random_uuid(), 'acme', 'payment', 'ACCEPTED', '', 'key', now(), now() FROM generate_series(1, 10)
        RETURNING request_id),
    queued AS (INSERT INTO request_job (request_id, downstream, claimable_at) SELECT request_id, 'd', now() FROM inserted)
    INSERT INTO request_ledger (slot, accepted) VALUES (1, 10)
    ON CONFLICT (slot) DO UPDATE SET accepted = request_ledger.accepted + 10";
const INSERT_SLOTS: &str = "
    INSERT INTO rate_limit_config VALUES ('c', 1, 5, 'PT1S', 1000, true, now()) ON CONFLICT DO NOTHING;
    INSERT INTO rate_limit_event_slot SELECT 'e' || n, 'c', 'epoch', 'epoch', 'epoch' FROM generate_series(1, 3) AS n;
    INSERT INTO rate_limit_window_counter VALUES ('c', 'epoch', 3, 'OPEN')";
/// A database of the version before, as the migration leaves it: with rows, and without triggers.
const FORGET_COUNTS: &str = "
    DO $$ DECLARE name text; BEGIN
        FOR name IN SELECT oid::regprocedure FROM pg_proc WHERE proname LIKE 'weir\\_count\\_%' LOOP
            EXECUTE 'DROP FUNCTION ' || name || ' CASCADE';
        END LOOP;
    END $$;
    DELETE FROM row_count; DELETE FROM row_count_complete";

async fn open(database: &Database) -> Postgres {
    Postgres::open(database.url().parse().expect("a Postgres URL"), 2).await.expect("it opens")
}

async fn books(engine: &Postgres) -> Books {
    engine.books().await.expect("books must succeed").expect("the counts are complete")
}

/// What a recount finds in row counts and in slot.
async fn recount(engine: &Postgres) -> Vec<String> {
    let recount = engine.recount(&|_step| ()).await.expect("recount must succeed");
    assert_eq!(engine.last_recount().await.expect("last_recount must succeed"), Some(recount.clone()));
    recount.differences.into_iter().map(|found| found.what).collect()
}

#[tokio::test]
async fn what_is_lost_or_forged_is_found_and_named() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("books").await;
    let engine = open(&database).await;
    assert_eq!(engine.last_recount().await.expect("last_recount must succeed"), None);
    database.execute(INSERT_REQUESTS).await;
    database.execute(INSERT_SLOTS).await;
    let requests = books(&engine).await.requests();
    assert_eq!((requests.difference(), requests.in_flight, requests.jobs), (0, 10, 10));
    assert_eq!(recount(&engine).await, Vec::<String>::new());

    let delete_one =
        "DELETE FROM request_record WHERE request_id IN (SELECT request_id FROM request_record LIMIT 1)";
    database.execute(delete_one).await;
    assert_eq!(books(&engine).await.requests().difference(), 1, "a lost request shows at once");
    database.execute("UPDATE request_record SET status = 'COMPLETED' WHERE request_id IN (SELECT request_id FROM request_record LIMIT 2)").await;
    let requests = books(&engine).await.requests();
    assert_eq!(
        (requests.completed, requests.in_flight, requests.jobs),
        (2, 7, 10),
        "jobs without a request, too"
    );
    assert_eq!(recount(&engine).await, Vec::<String>::new(), "the counts are right");

    // What is deleted behind the triggers shows when the rows are read.
    let behind = format!("SET session_replication_role = replica; {delete_one}");
    database.execute(&behind).await;
    let counted = books(&engine).await.requests();
    assert_eq!(counted.completed + counted.in_flight, 9);
    let found = recount(&engine).await;
    assert!(found.len() == 1 && found[0].starts_with("request_record "), "{found:?}");
    assert!(found[0].ends_with(" found, 2 counted") || found[0].ends_with(" found, 7 counted"), "{found:?}");

    let forge = "INSERT INTO row_count (table_name, kind, amount) VALUES ('purchases', '7', 3)";
    database.execute(forge).await;
    assert_eq!(books(&engine).await.sales().persisted, 3, "although nothing is sold");
    assert!(recount(&engine).await.contains(&"purchases 7: 0 found, 3 counted".to_owned()));

    database.execute("UPDATE rate_limit_window_counter SET slot_count = 4").await;
    let slots = books(&engine).await.slots(None);
    assert_eq!((slots.slots, slots.counted), (3, 4), "a forged counter shows at once");
    let found = recount(&engine).await;
    assert!(found.iter().any(|what| what.starts_with("c 1970-01-01")), "and its window is named: {found:?}");
}

#[tokio::test]
async fn rows_from_before_the_counts_are_counted_while_others_write() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("books").await;
    let (one, other) = (open(&database).await, open(&database).await);
    database.execute(INSERT_REQUESTS).await;
    database.execute(FORGET_COUNTS).await;
    database.execute(INSERT_REQUESTS).await;
    database.execute(INSERT_SLOTS).await;
    assert_eq!(one.books().await.expect("books must succeed"), None, "they would be wrong");
    // A server that died after it had created triggers.
    let records = super::TABLES.iter().find(|table| table.name == "request_record").expect("it is counted");
    database.execute(&super::create_triggers(records)).await;
    database.execute(INSERT_REQUESTS).await;
    let write = async {
        for _ in 0..20 {
            database.execute(INSERT_REQUESTS).await;
        }
    };
    let (first, second, ()) = tokio::join!(one.tend_counts(), other.tend_counts(), write);
    // One that waits for the other's lock for too long leaves it to that.
    assert!(first.is_ok() || second.is_ok(), "{first:?} {second:?}");
    let requests = books(&other).await.requests();
    assert_eq!((requests.accepted, requests.in_flight, requests.jobs), (230, 230, 230));
    assert_eq!(recount(&one).await, Vec::<String>::new());

    // Somebody has gone back for good and dropped the triggers, and returns.
    database.execute("DROP FUNCTION weir_count_request_job CASCADE").await;
    database.execute(INSERT_REQUESTS).await;
    assert_eq!(one.books().await.expect("books must succeed"), None);
    one.tend_counts().await.expect("tend_counts must succeed");
    assert_eq!(books(&one).await.requests().jobs, 240);
    assert_eq!(recount(&one).await, Vec::<String>::new());
}

#[tokio::test]
async fn counts_that_pile_up_are_folded_by_several_servers_at_once() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("books").await;
    let (one, other) = (open(&database).await, open(&database).await);
    let pile_up = "
        INSERT INTO row_count (table_name, kind, amount) SELECT 'dead_letter', n % 7, 1 FROM generate_series(1, 3000) AS n;
        INSERT INTO row_count (table_name, kind, amount) SELECT 'dead_letter', 'gone', (-1) ^ n FROM generate_series(1, 3000) AS n";
    database.execute(pile_up).await;
    let before = books(&one).await;
    let write = async {
        for _ in 0..20 {
            database.execute(INSERT_REQUESTS).await;
        }
    };
    let tend = async |engine: &Postgres| {
        for _ in 0..5 {
            engine.tend_counts().await.expect("tend_counts must succeed");
        }
    };
    tokio::join!(tend(&one), tend(&other), write);
    let after = books(&other).await;
    assert_eq!((after.total("dead_letter"), before.total("dead_letter")), (3_000, 3_000));
    assert_eq!((after.amount("dead_letter", "3"), after.amount("dead_letter", "gone")), (429, 0));
    assert_eq!(after.requests().in_flight, 200);
    let rows = database.query_strings("SELECT count(*) FROM row_count").await;
    let rows: usize = rows[0][0].as_deref().expect("a count").parse().expect("a number");
    assert!(rows < 600, "{rows} rows are left");
}

#[tokio::test]
async fn no_reading_differs_while_others_write_and_fold() {
    if weir_testkit::skip("postgres") {
        return;
    }
    const FINISH_SOME: &str = "
        WITH finished AS (
            UPDATE request_record SET status = 'COMPLETED' WHERE request_id IN (
                SELECT request_id FROM request_job LIMIT 7 FOR UPDATE SKIP LOCKED)
            RETURNING request_id)
        DELETE FROM request_job WHERE request_id IN (SELECT request_id FROM finished)";
    const PURGE_SOME: &str = "
        WITH purged AS (
            DELETE FROM request_record WHERE request_id IN (
                SELECT request_id FROM request_record WHERE status = 'COMPLETED' LIMIT 5 FOR UPDATE SKIP LOCKED)
            RETURNING request_id)
        INSERT INTO request_ledger (slot, purged) SELECT 2, count(*) FROM purged
        ON CONFLICT (slot) DO UPDATE SET purged = request_ledger.purged + excluded.purged";
    let database = Server::shared().database("books").await;
    let (one, other) = (open(&database).await, open(&database).await);
    let write = async |sql: &str| {
        for _ in 0..100 {
            database.execute(sql).await;
        }
    };
    let writers = futures_util::future::join4(
        write(INSERT_REQUESTS),
        write(INSERT_REQUESTS),
        write(FINISH_SOME),
        write(PURGE_SOME),
    );
    // Makes a fold necessary each time.
    let pile_up = "INSERT INTO row_count (table_name, kind, amount) SELECT 'dead_letter', 'x', 0 FROM generate_series(1, 600)";
    let read = async |engine: &Postgres| loop {
        database.execute(pile_up).await;
        engine.tend_counts().await.expect("tend_counts must succeed");
        let requests = books(engine).await.requests();
        assert_eq!((requests.difference(), requests.jobs), (0, requests.in_flight), "{requests:?}");
        assert_eq!(recount(engine).await, Vec::<String>::new());
    };
    // Readers never end by themselves.
    tokio::select! {
        _ = writers => {}
        () = read(&one) => {}
        () = async { loop {
            other.tend_counts().await.expect("tend_counts must succeed");
            books(&other).await;
        } } => {}
    }
    let requests = books(&other).await.requests();
    assert_eq!((requests.accepted, requests.difference()), (2_000, 0), "{requests:?}");
}

#[tokio::test]
async fn one_of_several_servers_recounts_in_time() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("books").await;
    let (one, other) = (open(&database).await, open(&database).await);
    let hour = std::time::Duration::from_secs(3_600);
    let claims = tokio::join!(one.claim_recount(hour), other.claim_recount(hour));
    assert_eq!([claims.0, claims.1].into_iter().filter(|claim| matches!(claim, Ok(true))).count(), 1);
    assert!(!one.claim_recount(hour).await.expect("an answer"), "it was begun just now");
    database.execute("UPDATE recount SET claimed_at = now() - interval '61 minutes'").await;
    assert!(other.claim_recount(hour).await.expect("an answer"), "whoever began it may have died");
}
