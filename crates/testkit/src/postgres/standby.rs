//! Streaming replication: standbys, their promotion, and a primary that becomes one.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Options, Server, cluster, connection, find};
use crate::clock::FakeClock;
use crate::discover::EngineSource;
use crate::instance::{Handle, Instance, READY_TIMEOUT, run_blocking, with_unused_port};
use crate::wait::until;

impl Server {
    /// Starts a standby with this clock, and makes this server wait for it with every commit from now on.
    pub async fn standby(&self, clock: &FakeClock) -> Self {
        let environment = clock.environment().map(|(name, value)| (name.into(), value.into())).to_vec();
        let options = Options { environment, ..Options::default() };
        let primary = self.url.clone();
        let standby = run_blocking(move || {
            with_unused_port("PostgreSQL", |port| {
                let EngineSource::Local(bin_dir) = find::source().unwrap_or_else(|reason| panic!("{reason}"))
                else {
                    panic!(
                        "a standby needs local programs: install PostgreSQL, or set WEIR_TEST_SKIP=postgres"
                    );
                };
                let cluster = cluster::Cluster::create_standby(bin_dir, port, &primary, &options);
                let instance: Arc<Mutex<dyn Instance>> = Arc::new(Mutex::new(cluster));
                let instance = Handle::new("PostgreSQL", instance);
                instance.lock().launch();
                let mut url = primary.clone();
                url.set_port(Some(port)).expect("a postgres URL takes a port");
                instance.wait_ready(|| connection::probe(&url, None))?;
                let bin_dir = Some(bin_dir.clone());
                Ok(Self { url, ca_file: None, bin_dir, instance: Some(instance), idle: None })
            })
        })
        .await;
        self.wait_for_standbys("*").await;
        let in_step = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        until("the standby confirms commits", READY_TIMEOUT, async || self.value(in_step).await == "1").await;
        standby
    }

    /// Sets `synchronous_standby_names`: the standbys that every commit waits for.
    pub async fn wait_for_standbys(&self, names: &str) {
        self.value(&format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'")).await;
        self.value("SELECT pg_reload_conf()").await;
    }

    /// Promotes a standby and waits until it accepts writes.
    pub async fn promote(&self) {
        assert_eq!(self.value("SELECT pg_promote()").await, "t", "its log:\n{}", self.log());
    }

    /// Starts a stopped or crashed primary as a standby, which accepts no writes.
    pub async fn start_demoted(&mut self) {
        self.own_instance().lock().demote();
        self.start().await;
    }

    /// Runs a statement on the database `postgres`. Returns the first value of its first row, if any.
    async fn value(&self, sql: &str) -> String {
        let result = async {
            let client = connection::open(&self.url, self.ca_file.as_deref()).await?;
            client.simple_query(sql).await
        };
        let messages = result.await.unwrap_or_else(|error| panic!("{}: {sql}", connection::describe(&error)));
        let first = messages.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        first.unwrap_or_default().to_owned()
    }
}
