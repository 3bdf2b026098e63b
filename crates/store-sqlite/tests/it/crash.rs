//! State after a crash, simulated by copying the files of an engine that is still open.

use std::fs;
use std::path::Path;

use weir_core::UserId;
use weir_core::quota::QuotaLimits;
use weir_queue::Queue;
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome, TOPIC};
use weir_store_sqlite::Sqlite;

/// So many that a batch is not saved in place but in the journal.
const USERS: usize = 50;

fn users() -> Vec<UserId> {
    (0..USERS).map(|n| UserId::parse(format!("user-{n}")).expect("a short id")).collect()
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("a file");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
}

#[tokio::test]
async fn a_wide_batch_is_counted_and_queued_after_a_crash() {
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let engine = Sqlite::open(before.path()).unwrap();
    for user in users() {
        engine.configure(&user, QuotaLimits::new(3, 60).unwrap()).await.unwrap();
    }
    for _ in 0..2 {
        let batch: Vec<_> = users()
            .into_iter()
            .map(|user| SendMessage { user, message: "hello".into(), key: None, trace: None })
            .collect();
        let outcomes = engine.send_batch(batch.into()).await.unwrap();
        assert!(outcomes.iter().all(|outcome| matches!(outcome, SendOutcome::Accepted { .. })));
    }
    // New limits override the count that the journal has of a user.
    engine.configure(&users()[0], QuotaLimits::new(9, 60).unwrap()).await.unwrap();
    copy(before.path(), after.path());

    let restarted = Sqlite::open(after.path()).unwrap();
    for (n, user) in users().iter().enumerate() {
        let row = restarted.find(user).await.unwrap().unwrap();
        assert_eq!(row.current_count, if n == 0 { 0 } else { 2 }, "{user}");
    }
    assert_eq!(Queue::audit(&restarted, TOPIC).await.unwrap().in_flight, 2 * USERS as u64);
    assert!(QuotaStore::audit(&restarted).await.unwrap().over_limit.is_empty());
}
