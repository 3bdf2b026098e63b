//! Waking whoever waits for a topic, within one process. What other processes enqueue is found by asking again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Topics that have a bell. Operators may ask for topics of any name; when there are more, bells that nobody waits for are
/// taken down, and whoever comes later looks for work when its time is over.
pub const BELLS_MAX: usize = 1_024;

/// One bell per topic. A ring that nobody waits for is kept for the next one who does.
#[derive(Debug, Default)]
pub struct Bells(Mutex<HashMap<String, Arc<Notify>>>);

impl Bells {
    /// Says that `topic` has something new.
    pub fn ring(&self, topic: &str) {
        self.bell(topic).notify_one();
    }

    /// Waits for a ring, at most so long.
    pub async fn wait(&self, topic: &str, at_most: Duration) {
        // Running out of time is as good as a ring: the caller looks for work either way.
        let _ = tokio::time::timeout(at_most, self.bell(topic).notified()).await;
    }

    fn bell(&self, topic: &str) -> Arc<Notify> {
        let mut bells = self.0.lock();
        if let Some(bell) = bells.get(topic) {
            return Arc::clone(bell);
        }
        if bells.len() >= BELLS_MAX {
            // Whoever waits holds the bell too.
            bells.retain(|_, bell| Arc::strong_count(bell) > 1);
        }
        if bells.len() >= BELLS_MAX {
            return Arc::default();
        }
        Arc::clone(bells.entry(topic.to_owned()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_ring_before_the_wait_is_not_lost() {
        let bells = Bells::default();
        bells.ring("a");
        // Would hang, not fail, if the ring were lost; the test runner's own limit ends it.
        bells.wait("a", Duration::MAX).await;
    }

    #[tokio::test]
    async fn there_are_no_more_bells_than_the_bound_and_those_in_use_stay() {
        let bells = Bells::default();
        // As one who waits does.
        let in_use = bells.bell("in use");
        for n in 0..BELLS_MAX * 2 {
            bells.ring(&format!("topic {n}"));
            assert!(bells.0.lock().len() <= BELLS_MAX);
        }
        bells.ring("in use");
        in_use.notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn another_topics_ring_wakes_nobody_here() {
        let bells = Bells::default();
        bells.ring("b");
        let started = tokio::time::Instant::now();
        bells.wait("a", Duration::from_secs(3)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(3), "virtual time: it waited to the end");
    }
}
