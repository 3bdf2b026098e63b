//! Wakes consumers of a topic within one process. They find messages of other processes by polling.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The most topics with a notification. Operators may name any topic; beyond this number, topics without a waiting
/// consumer are removed, and a consumer of yet another topic finds messages only when its wait ends.
pub const TOPICS_MAX: usize = 1_024;

/// One notification per topic. If no consumer waits, it is stored for the next one.
#[derive(Debug, Default)]
pub struct TopicNotify(Mutex<HashMap<String, Arc<Notify>>>);

impl TopicNotify {
    /// Wakes a consumer of `topic`.
    pub fn notify(&self, topic: &str) {
        self.topic(topic).notify_one();
    }

    /// Waits for a notification, for `at_most` at the longest.
    pub async fn wait(&self, topic: &str, at_most: Duration) {
        // The caller also polls after a timeout.
        let _ = tokio::time::timeout(at_most, self.topic(topic).notified()).await;
    }

    fn topic(&self, topic: &str) -> Arc<Notify> {
        let mut topics = self.0.lock();
        if let Some(notify) = topics.get(topic) {
            return Arc::clone(notify);
        }
        if topics.len() >= TOPICS_MAX {
            // Waiting consumers hold a reference, too.
            topics.retain(|_, notify| Arc::strong_count(notify) > 1);
        }
        if topics.len() >= TOPICS_MAX {
            return Arc::default();
        }
        Arc::clone(topics.entry(topic.to_owned()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_notification_before_the_wait_is_not_lost() {
        let topics = TopicNotify::default();
        topics.notify("a");
        // If the notification were lost, this would hang until the test runner's timeout.
        topics.wait("a", Duration::MAX).await;
    }

    #[tokio::test]
    async fn there_are_no_more_topics_than_the_bound_and_those_in_use_stay() {
        let topics = TopicNotify::default();
        // As a waiting consumer does.
        let in_use = topics.topic("in use");
        for n in 0..TOPICS_MAX * 2 {
            topics.notify(&format!("topic {n}"));
            assert!(topics.0.lock().len() <= TOPICS_MAX);
        }
        topics.notify("in use");
        in_use.notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_notification_of_another_topic_does_not_end_a_wait() {
        let topics = TopicNotify::default();
        topics.notify("b");
        let started = tokio::time::Instant::now();
        topics.wait("a", Duration::from_secs(3)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(3), "virtual time: it waited to the end");
    }
}
