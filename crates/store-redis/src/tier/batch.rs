//! Batches decisions: those that wait at the same time are one call of the script, on a cluster one for each hash slot.

use std::sync::Arc;

use futures_util::future::join_all;
use redis::Value;
use weir_core::{Clock, Timestamp};
use weir_store::{Batch, Error, LaneMetrics, LaneSettings, Lanes, Result};

use super::Operation;
use super::script_key::ScriptKey;
use crate::client::Redis;
use crate::script::Script;

/// The most decisions in one batch: Redis runs nothing else meanwhile.
const BATCH_MAX: usize = 128;
/// Batches in flight at once: the next one has arrived when Redis finishes one.
const IN_FLIGHT: usize = 2;
/// Lanes on a cluster: a server that does not answer delays the decisions that share a lane with its keys by up to the call
/// timeout.
const CLUSTER_LANES: u16 = 16;

/// The keys and arguments of one decision, for the script.
#[derive(Debug)]
pub(super) struct DecisionCall {
    keys: Vec<Arc<str>>,
    arguments: Vec<String>,
}

impl DecisionCall {
    /// Creates the call of a decision about keys of one hash slot.
    pub(super) fn new(operation: Operation, keys: &[ScriptKey]) -> Self {
        let mut arguments = vec![operation.as_str().to_owned(), keys.len().to_string()];
        keys.iter().for_each(|key| key.add_arguments(&mut arguments));
        Self { keys: keys.iter().map(|key| Arc::clone(&key.name)).collect(), arguments }
    }
}

/// The script's reply to one decision, and Redis's time of it.
#[derive(Debug)]
pub(super) struct DecisionReply {
    pub(super) now: Timestamp,
    pub(super) fields: Vec<Value>,
}

/// The lanes in which decisions wait for the next call.
pub(super) struct DecisionLanes {
    lanes: Lanes<DecisionCall, Option<DecisionReply>>,
}

impl DecisionLanes {
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
        let lanes = Lanes::start("tier", settings, metrics, &[], move |batch: Batch<DecisionCall>| {
            let (redis, test_clock, batch) = (redis.clone(), test_clock.clone(), batch.take());
            async move {
                let now = test_clock.map(|clock| clock.now().as_micros().to_string()).unwrap_or_default();
                Ok(call_script(&redis, &now, &batch).await)
            }
        });
        Self { lanes }
    }

    /// Submits a decision to Redis. Returns `None` when Redis does not answer in time, and fails when the lane is full.
    pub(super) async fn submit(&self, call: DecisionCall) -> Result<Option<DecisionReply>> {
        let Some(key) = call.keys.first().cloned() else { return Ok(None) };
        match self.lanes.submit(&key, call).await {
            Err(error @ Error::Overloaded { .. }) => Err(error),
            reply => Ok(reply.ok().flatten()),
        }
    }
}

async fn call_script(redis: &Redis, now: &str, batch: &[DecisionCall]) -> Vec<Option<DecisionReply>> {
    let groups = redis.group(batch.iter().map(|call| &*call.keys[0]));
    let calls = groups.iter().map(|group| {
        let decisions = || group.iter().map(|index| &batch[*index]);
        let keys: Vec<&str> = decisions().flat_map(|decision| &decision.keys).map(|key| &**key).collect();
        let arguments = decisions().flat_map(|decision| &decision.arguments).map(String::as_str);
        let arguments: Vec<&str> = std::iter::once(now).chain(arguments).collect();
        async move { redis.call_once(Script::Tier, &keys, &arguments).await }
    });
    let mut replies: Vec<Option<DecisionReply>> = batch.iter().map(|_| None).collect();
    for (group, reply) in groups.iter().zip(join_all(calls).await) {
        let Ok(Value::Array(mut values)) = reply else { continue };
        if values.len() != group.len() + 1 {
            continue;
        }
        let Value::Int(now) = values.remove(0) else { continue };
        for (index, value) in group.iter().zip(values) {
            if let Value::Array(fields) = value {
                if let [Value::BulkString(error)] = &fields[..] {
                    redis.warn_refused(&String::from_utf8_lossy(error));
                }
                replies[*index] = Some(DecisionReply { now: Timestamp::from_micros(now), fields });
            }
        }
    }
    replies
}
