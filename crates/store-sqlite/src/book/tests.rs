//! Rows that are lost or forged behind the engine's back, and files of before the counts.

use std::path::Path;

use super::*;

const INSERT_REQUESTS: &str = "
    INSERT INTO request_record
        (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at, downstream, claimable_at)
    VALUES ('a', 't', 'x', 'ACCEPTED', x'01', 'k', 1, 1, 'd', 1), ('b', 't', 'x', 'ACCEPTED', x'01', 'k', 1, 1, 'd', 1);
    UPDATE request_ledger SET accepted = accepted + 2;
    INSERT INTO rate_limit_config (config_name, version, max_per_window, window_size, window_size_ms, is_active, created_at)
    VALUES ('c', 1, 5, 'PT1S', 1000, 1, 0);
    INSERT INTO rate_limit_window_counter (config_name, generation, window_start, slot_count, status)
    VALUES ('c', 0, 0, 1, 'OPEN');
    INSERT INTO rate_limit_event_slot VALUES ('e', 'c', 0, 0, 0)";

fn shell(directory: &Path) -> Connection {
    crate::connect(&directory.join(crate::DATABASE_FILE)).unwrap()
}

async fn books(engine: &Sqlite) -> Books {
    engine.books().await.unwrap().expect("always complete")
}

async fn recount(engine: &Sqlite) -> Vec<String> {
    let recount = engine.recount(&|_step| ()).await.unwrap();
    assert_eq!(engine.last_recount().await.unwrap(), Some(recount.clone()));
    recount.differences.into_iter().map(|found| found.what).collect()
}

#[tokio::test]
async fn what_is_lost_or_forged_is_found_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Sqlite::open(directory.path()).unwrap();
    let shell = shell(directory.path());
    shell.execute_batch(INSERT_REQUESTS).unwrap();
    let requests = books(&engine).await.requests();
    assert_eq!((requests.difference(), requests.in_flight, requests.jobs), (0, 2, 2));
    assert_eq!(
        recount(&engine).await,
        ["rate_limit_event_slot: 1 found, 0 counted"],
        "a slot that the writer has not inserted"
    );
    shell
        .execute_batch("UPDATE row_count SET amount = 1 WHERE table_name = 'rate_limit_event_slot'")
        .unwrap();
    assert_eq!(recount(&engine).await, Vec::<String>::new());

    shell.execute_batch("DELETE FROM request_record WHERE request_id = 'a'").unwrap();
    let requests = books(&engine).await.requests();
    assert_eq!((requests.difference(), requests.jobs), (1, 1), "a lost request shows at once");
    shell.execute_batch("UPDATE request_record SET status = 'COMPLETED', claimable_at = NULL").unwrap();
    let requests = books(&engine).await.requests();
    assert_eq!((requests.completed, requests.in_flight, requests.jobs), (1, 0, 0));
    shell.execute_batch("INSERT INTO row_count VALUES ('purchases', '7', 3)").unwrap();
    assert_eq!(books(&engine).await.sales().persisted, 3, "although nothing is sold");
    shell.execute_batch("UPDATE rate_limit_window_counter SET slot_count = 4").unwrap();
    let slots = books(&engine).await.slots(None);
    assert_eq!((slots.slots, slots.counted), (1, 4));
    assert_eq!(recount(&engine).await, ["purchases 7: 0 found, 3 counted", "c 0"]);
}

#[tokio::test]
async fn what_was_not_counted_is_counted_when_the_engine_opens() {
    let directory = tempfile::tempdir().unwrap();
    drop(Sqlite::open(directory.path()).unwrap());
    {
        // A migration that rebuilds a table drops its triggers, and an older file has neither triggers nor counts.
        let shell = shell(directory.path());
        shell.execute_batch("DROP TRIGGER request_record_counted; DELETE FROM row_count").unwrap();
        shell.execute_batch(INSERT_REQUESTS).unwrap();
    }
    let engine = Sqlite::open(directory.path()).unwrap();
    let requests = books(&engine).await.requests();
    assert_eq!((requests.accepted, requests.in_flight, requests.jobs), (2, 2, 2));
    assert_eq!(recount(&engine).await, Vec::<String>::new());
    shell(directory.path()).execute_batch("DELETE FROM request_record").unwrap();
    assert_eq!(books(&engine).await.requests().in_flight, 0, "the triggers are back");
}

#[tokio::test]
async fn a_recount_whose_caller_is_gone_is_interrupted() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Sqlite::open(directory.path()).unwrap();
    let mut reader = LongReader::open(&engine).await.unwrap();
    let (ended, end) = tokio::sync::oneshot::channel();
    let endless = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT count(*) FROM n";
    let (begun, begins) = tokio::sync::oneshot::channel();
    let read = reader.read(move |connection| {
        let _ = begun.send(());
        let outcome = connection.query_row(endless, [], |row| row.get::<_, i64>(0));
        let _ = ended.send(outcome.is_err());
        outcome
    });
    tokio::select! {
        _ = read => panic!("it never ends"),
        begun = begins => begun.unwrap(),
    }
    drop(reader);

    assert!(end.await.unwrap());
}
