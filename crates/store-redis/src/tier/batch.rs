//! Decisions that wait together are one call of the script, on a cluster one for each hash slot.

use std::sync::Arc;

use futures_util::future::join_all;
use redis::Value;
use weir_core::{Clock, Timestamp};
use weir_store::{Batch, Error, LaneMetrics, LaneSettings, Lanes, Result};

use super::Mode;
use super::part::Part;
use crate::client::Redis;
use crate::script::Script;

/// Decisions in one batch: Redis does nothing else meanwhile.
const BATCH_MAX: usize = 128;
/// Batches under way at once: the next one is there when Redis is done with one.
const IN_FLIGHT: usize = 2;
/// Lanes on a cluster: a server that does not answer holds up the decisions that share a lane with its keys, for as long as one
/// call may take.
const CLUSTER_LANES: u16 = 16;

/// One decision as the script is asked for it.
#[derive(Debug)]
pub(super) struct Question {
    keys: Vec<Arc<str>>,
    arguments: Vec<String>,
}

impl Question {
    /// A question about parts that are together.
    pub(super) fn new(mode: Mode, parts: &[Part]) -> Self {
        let mut arguments = vec![mode.as_str().to_owned(), parts.len().to_string()];
        parts.iter().for_each(|part| part.add_arguments(&mut arguments));
        Self { keys: parts.iter().map(|part| Arc::clone(&part.name)).collect(), arguments }
    }
}

/// What the script said of one decision, and when, by Redis's clock.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) now: Timestamp,
    pub(super) fields: Vec<Value>,
}

/// Where decisions wait for the next call.
pub(super) struct Questions {
    lanes: Lanes<Question, Option<Reply>>,
}

impl Questions {
    pub(super) fn start(
        redis: Redis,
        test_clock: Option<Arc<dyn Clock>>,
        capacity: usize,
        metrics: LaneMetrics,
    ) -> Self {
        let settings = LaneSettings {
            lanes: if redis.is_cluster() { CLUSTER_LANES } else { 1 },
            capacity,
            batch_max: BATCH_MAX,
            in_flight: IN_FLIGHT,
            timeout: redis.call_timeout(),
        };
        let lanes = Lanes::start("tier", settings, metrics, &[], move |batch: Batch<Question>| {
            let (redis, test_clock, batch) = (redis.clone(), test_clock.clone(), batch.take());
            async move {
                let now = test_clock.map(|clock| clock.now().as_micros().to_string()).unwrap_or_default();
                Ok(decide(&redis, &now, &batch).await)
            }
        });
        Self { lanes }
    }

    /// Asks Redis; none when it does not answer in time.
    /// Fails when too many wait already.
    pub(super) async fn ask(&self, question: Question) -> Result<Option<Reply>> {
        let Some(key) = question.keys.first().cloned() else { return Ok(None) };
        match self.lanes.submit(&key, question).await {
            Err(error @ Error::Overloaded { .. }) => Err(error),
            answer => Ok(answer.ok().flatten()),
        }
    }
}

async fn decide(redis: &Redis, now: &str, batch: &[Question]) -> Vec<Option<Reply>> {
    let groups = redis.group(batch.iter().map(|question| &*question.keys[0]));
    let calls = groups.iter().map(|places| {
        let questions = || places.iter().map(|place| &batch[*place]);
        let keys: Vec<&str> = questions().flat_map(|question| &question.keys).map(|key| &**key).collect();
        let arguments = questions().flat_map(|question| &question.arguments).map(String::as_str);
        let arguments: Vec<&str> = std::iter::once(now).chain(arguments).collect();
        async move { redis.call_together(Script::Tier, &keys, &arguments).await }
    });
    let mut replies: Vec<Option<Reply>> = batch.iter().map(|_| None).collect();
    for (places, reply) in groups.iter().zip(join_all(calls).await) {
        let Ok(Value::Array(mut values)) = reply else { continue };
        if values.len() != places.len() + 1 {
            continue;
        }
        let Value::Int(now) = values.remove(0) else { continue };
        for (place, value) in places.iter().zip(values) {
            if let Value::Array(fields) = value {
                if let [Value::BulkString(error)] = &fields[..] {
                    redis.warn_of_refusal(&String::from_utf8_lossy(error));
                }
                replies[*place] = Some(Reply { now: Timestamp::from_micros(now), fields });
            }
        }
    }
    replies
}
