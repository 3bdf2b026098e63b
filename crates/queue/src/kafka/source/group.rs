//! Callbacks of librdkafka on the polling thread: partitions are assigned and revoked, commits are confirmed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{CommitMode, Consumer as _, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::topic_partition_list::TopicPartitionList;

use super::{Consumer, SharedSource, SourceState, list};
use crate::kafka::log;

/// How long revoking a partition waits until its claimed messages are settled.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The callbacks of one group member.
pub(super) struct GroupContext {
    pub(super) shared: Arc<SharedSource>,
}

impl ClientContext for GroupContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // The poll returns this error, too, and logs it.
        tracing::debug!(target: "weir::kafka", %error, reason, "the consumer reports an error");
    }
}

impl ConsumerContext for GroupContext {
    fn pre_rebalance(&self, consumer: &Consumer, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => {
                let partitions = partitions(list);
                tracing::debug!(target: "weir::kafka", topic = self.shared.topic, ?partitions, "assigned");
                self.shared.state.lock().in_flight.assign(partitions);
            }
            Rebalance::Revoke(list) => {
                let (partitions, lost) = (partitions(list), consumer.assignment_lost());
                tracing::debug!(target: "weir::kafka", topic = self.shared.topic, ?partitions, lost, "given up");
                if !lost {
                    self.finish(&partitions, consumer);
                }
                self.shared.state.lock().in_flight.revoke(partitions);
            }
            Rebalance::Error(error) => {
                tracing::warn!(target: "weir::kafka", topic = self.shared.topic, %error, "a rebalance failed");
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        if let Err(error) = result {
            tracing::debug!(target: "weir::kafka", topic = self.shared.topic, %error, "offsets are not committed yet");
            return;
        }
        let elements = offsets.elements();
        let committed = elements.iter().filter(|element| element.error().is_ok());
        let committed: Vec<(u16, i64)> = committed
            .filter_map(|element| {
                Some((u16::try_from(element.partition()).ok()?, element.offset().to_raw()?))
            })
            .collect();
        self.shared.state.lock().in_flight.committed(&committed);
    }
}

impl GroupContext {
    /// Stops claims of these partitions, waits until their claimed messages are settled, and commits their offsets.
    fn finish(&self, partitions: &[u16], consumer: &Consumer) {
        let busy = |state: &mut SourceState| {
            let out = state.committing || state.in_flight.is_out(partitions, Instant::now());
            out && !self.shared.is_ending()
        };
        let mut state = self.shared.state.lock();
        state.in_flight.stop_claims(partitions);
        self.shared.changed.wait_while_for(&mut state, busy, REVOKE_TIMEOUT);
        let mut offsets = state.in_flight.uncommitted();
        let stuck = state.committing;
        drop(state);
        offsets.retain(|(partition, _)| partitions.contains(partition));
        if !offsets.is_empty()
            && !stuck
            && let Err(error) = list(&self.shared.topic, &offsets)
                .and_then(|offsets| consumer.commit(&offsets, CommitMode::Sync))
        {
            tracing::warn!(
                target: "weir::kafka", topic = self.shared.topic, %error,
                "some messages were delivered and could not be committed; they will be delivered again"
            );
        }
    }
}

fn partitions(list: &TopicPartitionList) -> Vec<u16> {
    let elements = list.elements();
    elements.iter().filter_map(|element| u16::try_from(element.partition()).ok()).collect()
}
