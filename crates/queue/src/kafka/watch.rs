//! What is known of the brokers' health, and what wakes the thread that looks after it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Who cares for the producer waits here for something to do.
#[derive(Debug, Default)]
pub(super) struct Watch {
    refusing: AtomicBool,
    alarms: Mutex<Alarms>,
    wake: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Alarms {
    stop: bool,
    fatal: bool,
    suspect: bool,
}

/// What is to be done, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// The publisher is gone.
    Stop,
    /// The producer is beyond use.
    Rebuild,
    /// The brokers may be gone.
    Probe,
}

impl Alarms {
    /// Takes the most urgent task off the list.
    fn next(&mut self) -> Option<Task> {
        if self.stop {
            Some(Task::Stop)
        } else if std::mem::take(&mut self.fatal) {
            Some(Task::Rebuild)
        } else if std::mem::take(&mut self.suspect) {
            Some(Task::Probe)
        } else {
            None
        }
    }
}

impl Watch {
    /// Whether the brokers are known not to answer.
    pub(super) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Relaxed)
    }

    /// Says whether the brokers answer; true when that is news.
    pub(super) fn refuse(&self, refusing: bool) -> bool {
        self.refusing.swap(refusing, Ordering::Relaxed) != refusing
    }

    /// The brokers may be gone.
    pub(super) fn suspect(&self) {
        self.alarms.lock().suspect = true;
        self.wake.notify_all();
    }

    /// The producer is beyond use.
    pub(super) fn fatal(&self) {
        self.alarms.lock().fatal = true;
        self.wake.notify_all();
    }

    /// Nobody publishes any more.
    pub(super) fn stop(&self) {
        self.alarms.lock().stop = true;
        self.wake.notify_all();
    }

    /// Waits for something to do.
    pub(super) fn next(&self) -> Task {
        let mut alarms = self.alarms.lock();
        loop {
            if let Some(task) = alarms.next() {
                return task;
            }
            self.wake.wait(&mut alarms);
        }
    }

    /// Waits, unless there is something more urgent than a probe.
    pub(super) fn pause(&self, at_most: Duration) {
        let calm = |alarms: &mut Alarms| !alarms.stop && !alarms.fatal;
        self.wake.wait_while_for(&mut self.alarms.lock(), calm, at_most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_urgent_task_comes_first_and_each_once() {
        let watch = Watch::default();
        watch.suspect();
        watch.fatal();
        watch.suspect();
        assert_eq!(watch.next(), Task::Rebuild);
        assert_eq!(watch.next(), Task::Probe);
        watch.suspect();
        watch.stop();
        assert_eq!(watch.next(), Task::Stop);
        assert_eq!(watch.next(), Task::Stop, "for good");
    }
}
