//! The brokers' health, and the tasks of the publisher's watcher thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

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

/// Tasks of the watcher thread, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// The publisher was dropped.
    Stop,
    /// The producer has failed fatally.
    Rebuild,
    /// The brokers may be unreachable.
    Probe,
}

impl Alarms {
    /// Removes the most urgent task.
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
    /// Whether publishing is refused because no broker answers.
    pub(super) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Relaxed)
    }

    /// Sets whether publishing is refused. Returns whether that has changed.
    pub(super) fn refuse(&self, refusing: bool) -> bool {
        self.refusing.swap(refusing, Ordering::Relaxed) != refusing
    }

    /// The brokers may be unreachable.
    pub(super) fn suspect(&self) {
        self.alarms.lock().suspect = true;
        self.wake.notify_all();
    }

    /// The producer has failed fatally.
    pub(super) fn fatal(&self) {
        self.alarms.lock().fatal = true;
        self.wake.notify_all();
    }

    pub(super) fn stop(&self) {
        self.alarms.lock().stop = true;
        self.wake.notify_all();
    }

    /// Waits for a task.
    pub(super) fn next(&self) -> Task {
        let mut alarms = self.alarms.lock();
        loop {
            if let Some(task) = alarms.next() {
                return task;
            }
            self.wake.wait(&mut alarms);
        }
    }

    /// Waits, but not longer than until a task more urgent than a probe comes.
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
