//! Waking whoever waits for a topic, within one process. What other processes enqueue is found by asking again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Topics that are kept. Operators may ask for topics of any name; when there are more, those that nobody waits for are
/// removed, and whoever waits for another one finds work only when its wait ends.
pub const TOPICS_MAX: usize = 1_024;

/// One notification per topic. One that nobody waits for is kept for the next one who does.
#[derive(Debug, Default)]
pub struct TopicNotify(Mutex<HashMap<String, Arc<Notify>>>);

impl TopicNotify {
    /// Says that `topic` has something new.
    pub fn notify(&self, topic: &str) {
        self.notify_of(topic).notify_one();
    }

    /// Waits for a notification, for `at_most`.
    pub async fn wait(&self, topic: &str, at_most: Duration) {
        // The caller looks for work after a timeout as well.
        let _ = tokio::time::timeout(at_most, self.notify_of(topic).notified()).await;
    }

    fn notify_of(&self, topic: &str) -> Arc<Notify> {
        let mut topics = self.0.lock();
        if let Some(notify) = topics.get(topic) {
            return Arc::clone(notify);
        }
        if topics.len() >= TOPICS_MAX {
            // Whoever waits holds it, too.
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
        // Would hang, not fail, if it were lost; the test runner's own limit ends it.
        topics.wait("a", Duration::MAX).await;
    }

    #[tokio::test]
    async fn there_are_no_more_topics_than_the_bound_and_those_in_use_stay() {
        let topics = TopicNotify::default();
        // As one who waits does.
        let in_use = topics.notify_of("in use");
        for n in 0..TOPICS_MAX * 2 {
            topics.notify(&format!("topic {n}"));
            assert!(topics.0.lock().len() <= TOPICS_MAX);
        }
        topics.notify("in use");
        in_use.notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_notification_of_another_topic_wakes_nobody_here() {
        let topics = TopicNotify::default();
        topics.notify("b");
        let started = tokio::time::Instant::now();
        topics.wait("a", Duration::from_secs(3)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(3), "virtual time: it waited to the end");
    }
}
