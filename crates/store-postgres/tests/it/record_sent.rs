//! What a cache has granted is shown as sent by one statement, which must do what the rule in core says.

use std::sync::Arc;
use std::time::Duration;

use weir_core::{ManualClock, Timestamp};
use weir_store::quota::{QuotaStore, ReservableStore, ReservationRequest, ReservedUnits};
use weir_store_conformance::{START, fixtures};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_testkit::postgres::Server;

#[tokio::test]
async fn recording_what_was_sent_follows_the_rule() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("recorded").await;
    let target: PostgresTarget = database.url().parse().expect("a Postgres URL");
    let clock = Some(Arc::new(ManualClock::at(START)) as Arc<dyn weir_core::Clock>);
    let engine = Postgres::open_with_clock(target, 1, clock).await.expect("it opens");
    let engine = engine.behind_cache(false).await.expect("a new database");
    let users = ["alice", "bob"].map(fixtures::user);
    for user in &users {
        engine.configure(user, fixtures::limits(50, 60)).await.expect("it is configured");
    }
    let requests = users.clone().map(|user| ReservationRequest { user, units: 1 }).to_vec();
    let reserved = engine.reserve(requests).await.expect("a reservation");
    let mut rows: Vec<_> = reserved.into_iter().flatten().map(|reserved| reserved.row).collect();
    assert_eq!(
        rows.iter().map(|row| (row.current_count, row.reserved_count)).collect::<Vec<_>>(),
        [(1, 5); 2]
    );
    let before = Timestamp::from_micros(START.as_micros() - 1);
    let moved_back = START.plus(Duration::from_secs(60));
    for (window, units) in [(START, 2), (before, 1), (moved_back, 1), (START, 9), (START, 1)] {
        let sent = users.clone().map(|user| ReservedUnits { user, window, units });
        engine.record_sent(sent.to_vec()).await.expect("it is recorded");
        for (user, row) in users.iter().zip(&mut rows) {
            row.record_sent(window, units);
            assert_eq!(engine.find(user).await.expect("an answer"), Some(*row), "{units} of {window:?}");
        }
    }
    assert_eq!(
        rows.iter().map(|row| (row.current_count, row.reserved_count)).collect::<Vec<_>>(),
        [(6, 0); 2]
    );
    assert_eq!(engine.audit().await.expect("an audit").over_limit, [""; 0]);
}
