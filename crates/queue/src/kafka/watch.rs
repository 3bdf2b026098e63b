//! The brokers' health, and the tasks of the publisher's watcher thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Why brokers cannot be used although they are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    Credentials,
    Tls,
}

impl Problem {
    pub(super) const fn sentence(self) -> &'static str {
        match self {
            Self::Credentials => "the brokers refuse the credentials",
            Self::Tls => "no TLS connection to the brokers can be made",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Watch {
    refusing: AtomicBool,
    problem: Mutex<Option<Problem>>,
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

    /// What was last known to be wrong with the connection, until brokers answer.
    pub(super) fn problem(&self) -> Option<Problem> {
        *self.problem.lock()
    }

    /// Sets what is wrong with the connection. Returns whether that was not known.
    pub(super) fn set_problem(&self, problem: Option<Problem>) -> bool {
        std::mem::replace(&mut *self.problem.lock(), problem) != problem
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
