//! The conformance suite on Postgres, each case in a database of its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use weir_core::{Clock, ManualClock};
use weir_queue::Queue;
use weir_store::quota::{QuotaStore, TOPIC};
use weir_store_conformance::{Harness, PATIENCE, START, given};
use weir_store_postgres::Postgres;
use weir_testkit::postgres::{Database, Server};

pub(crate) struct OnPostgres {
    database: Arc<Database>,
    clock: ManualClock,
    engine: Postgres,
}

impl OnPostgres {
    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    async fn on(database: Arc<Database>, clock: ManualClock) -> Self {
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let manual: Arc<dyn Clock> = Arc::new(clock.clone());
        let engine = Postgres::open_with_clock(target.with_patience(PATIENCE), 8, Some(manual))
            .await
            .expect("it opens");
        Self { database, clock, engine }
    }
}

#[async_trait::async_trait]
impl Harness for OnPostgres {
    async fn open() -> Self {
        let database = Server::shared().database("conformance").await;
        Self::on(Arc::new(database), ManualClock::at(START)).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::new(self.engine.clone())
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }

    fn store_clock(&self) -> Option<Arc<dyn weir_store::StoreClock>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { database, clock, engine } = self;
        drop(engine);
        Self::on(database, clock).await
    }

    async fn another(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.database), self.clock.clone()).await)
    }
}

weir_store_conformance::suite!(OnPostgres);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_one_message_holds_one_shard() {
    if OnPostgres::skipped() {
        return;
    }
    let h = OnPostgres::open().await;
    for user in 0..20 {
        given::queued(&h, &format!("user-{user}"), 1).await;
    }
    let visibility = Duration::from_secs(30);
    let one = h.queue().claim(TOPIC, 1, visibility).await.expect("a claim");
    assert_eq!((one.messages.len(), one.receipt.leases.len()), (1, 1));
    let several = h.queue().claim(TOPIC, 3, visibility).await.expect("a claim");
    let shards: BTreeSet<u16> = several.messages.iter().map(|message| message.position.shard).collect();
    assert_eq!(several.receipt.leases.len(), shards.len(), "and no more than there are messages of");
}
