//! Random histories against the engine and the model: both must give the same answers.
//!
//! A failure prints its seed; `WEIR_CONFORMANCE_SEED` repeats that history.

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use weir_core::{Clock, MessageId, Timestamp, UserId};
use weir_store::Result;
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome, TOPIC};

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{limits, send, texts_by_key, user};
use crate::model::Model;

const HISTORIES: usize = 30;
const STEPS: usize = 40;
const USERS: usize = 5;

/// The seed in `WEIR_CONFORMANCE_SEED`, or a random one.
pub(crate) fn seed() -> u64 {
    let requested = std::env::var("WEIR_CONFORMANCE_SEED").ok();
    requested.map_or_else(
        || fastrand::u64(..),
        |text| text.parse().expect("WEIR_CONFORMANCE_SEED must be a number"),
    )
}

pub async fn random_histories_match_the_model<H: HasQuota>() {
    let h = H::open().await;
    let model = Arc::new(Model::new(h.clock().clone(), 1));
    let seed = seed();
    let mut comparison =
        Comparison { h: &h, engine: h.quota(), model, rng: Rng::with_seed(seed), seed, history: 0 };
    for history in 0..HISTORIES {
        comparison.history = history;
        for _ in 0..STEPS {
            comparison.step().await;
        }
    }
    comparison.compare_queues().await;
}

/// An engine and the model, on the same clock.
struct Comparison<'h, H> {
    h: &'h H,
    engine: Arc<dyn QuotaStore>,
    model: Arc<Model>,
    rng: Rng,
    seed: u64,
    history: usize,
}

impl<H: HasQuota> Comparison<'_, H> {
    async fn step(&mut self) {
        match self.rng.u8(0..20) {
            0..3 => {
                let (user, limits) = (self.user(), limits(self.rng.u32(1..=6), self.rng.u32(1..=3)));
                self.both(format!("configure {user} {limits:?}"), |store| {
                    let user = user.clone();
                    async move { store.configure(&user, limits).await }
                })
                .await;
            }
            3 => {
                let user = self.user();
                self.both(format!("remove {user}"), |store| {
                    let user = user.clone();
                    async move { store.remove(&user).await }
                })
                .await;
            }
            4..12 => self.send().await,
            12..16 => self.advance().await,
            16..19 => {
                self.find().await;
            }
            _ => {
                self.both("audit".to_owned(), |store| async move { store.audit().await }).await;
            }
        }
    }

    fn user(&mut self) -> UserId {
        user(&format!("{}-{}", self.history, self.rng.usize(0..USERS)))
    }

    /// Makes the same call to both, expects the same answer, and returns it.
    async fn both<T, F>(&self, what: String, call: impl Fn(Arc<dyn QuotaStore>) -> F) -> T
    where
        T: Debug + PartialEq,
        F: Future<Output = Result<T>>,
    {
        let engine = call(Arc::clone(&self.engine)).await.expect("the engine must answer");
        let model = call(Arc::<Model>::clone(&self.model)).await.expect("the model answers");
        let (seed, history) = (self.seed, self.history);
        assert_eq!(engine, model, "engine and model must agree: seed {seed}, history {history}, {what}");
        engine
    }

    async fn find(&mut self) -> Option<Timestamp> {
        let user = self.user();
        let found = self.both(format!("find {user}"), |store| {
            let user = user.clone();
            async move { store.find(&user).await }
        });
        Some(found.await?.reset_at())
    }

    async fn send(&mut self) {
        let count = self.rng.usize(0..=12);
        let mut command = || send(self.user().as_str(), &self.rng.u32(..).to_string());
        let batch: Vec<SendMessage> = (0..count).map(|_| command()).collect();
        self.both(format!("send {batch:?}"), |store| {
            let batch = batch.clone();
            async move {
                Ok(store.send_batch(batch.into()).await?.into_iter().map(without_id).collect::<Vec<_>>())
            }
        })
        .await;
    }

    /// Moves the clock by a random time, or to just before, at or just after the end of a user's window.
    async fn advance(&mut self) {
        let end = self.find().await;
        let to_end = end.map_or(Duration::ZERO, |end| end.since(self.h.clock().now()));
        let step = match self.rng.u8(0..6) {
            0 => Duration::from_micros(self.rng.u64(1..2_000_000)),
            1 => Duration::from_secs(self.rng.u64(1..90)),
            2 => to_end.saturating_sub(Duration::from_micros(1)),
            3 => to_end + Duration::from_micros(1),
            _ => to_end,
        };
        self.h.clock().advance(step);
    }

    /// Both queues must hold the same messages, in the same order for each key.
    async fn compare_queues(&self) {
        let engine = texts_by_key(&Claims::drain(self.h).await);
        let claim =
            weir_queue::MessageSource::claim(&*self.model, TOPIC, usize::MAX, Duration::from_secs(60));
        let model = texts_by_key(&claim.await.expect("the model answers").messages);
        assert_eq!(engine, model, "engine and model must hold the same messages: seed {}", self.seed);
    }
}

/// The outcome with a fixed message id, since ids are random.
fn without_id(outcome: SendOutcome) -> SendOutcome {
    let fixed_id = MessageId::new(Timestamp::EPOCH, [0; 10]);
    match outcome {
        SendOutcome::Accepted { limits, grant, at, .. } => {
            SendOutcome::Accepted { message_id: fixed_id, limits, grant, at }
        }
        other => other,
    }
}
