//! The cases of request with Redis in front of Postgres, each in a database of its own. They share one Redis: no two have a
//! request of the same id.

use std::sync::{Arc, OnceLock};

use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::request::RequestStore;
use weir_store_conformance::PATIENCE;
use weir_store_conformance::START;
use weir_store_conformance::request::{RequestHarness, given};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisRequests};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{Options, Server};

struct BehindRedis {
    database: Arc<Database>,
    clock: Arc<ManualClock>,
    engine: Postgres,
    redis: Redis,
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::private(&Options { appendonly: false, ..Options::default() }))
}

impl BehindRedis {
    async fn on(database: Arc<Database>, clock: Arc<ManualClock>) -> Self {
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let time = Arc::<ManualClock>::clone(&clock);
        let engine =
            Postgres::open_with_clock(target.with_patience(PATIENCE), 8, Some(time)).await.expect("it opens");
        let target: weir_store_redis::Target = server().url().parse().expect("a Redis URL");
        let redis = Redis::start(target.with_patience(PATIENCE));
        redis.connected().await;
        Self { database, clock, engine, redis }
    }
}

#[async_trait::async_trait]
impl RequestHarness for BehindRedis {
    async fn open() -> Self {
        let database = Arc::new(postgres::Server::shared().database("request").await);
        Self::on(database, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres") || weir_testkit::skip("redis")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(RedisRequests::new(self.redis.clone(), Arc::new(self.engine.clone())))
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }

    fn store_clock(&self) -> Option<Arc<dyn weir_store::StoreClock>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { database, clock, engine, redis } = self;
        drop((engine, redis));
        Self::on(database, clock).await
    }

    async fn another(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.database), Arc::clone(&self.clock)).await)
    }
}

weir_store_conformance::request_suite!(BehindRedis);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_is_kept_until_it_changes() {
    if BehindRedis::skipped() {
        return;
    }
    let h = BehindRedis::open().await;
    let id = given::accepted_one(&h, given::wish(&h, "key")).await;
    let first = h.requests().find_request(id).await.expect("an answer");
    assert!(first.is_some());
    h.database.execute("UPDATE request_record SET attempts = 9").await;
    assert_eq!(h.requests().find_request(id).await.expect("an answer"), first, "from Redis");
    h.requests().mark_enqueued(&[id]).await.expect("an answer");
    for _ in 0..2 {
        let now = h.requests().find_request(id).await.expect("an answer").expect("a request");
        assert_eq!(now.attempts, 9, "from the store, as long as the change is fresh");
    }
}
