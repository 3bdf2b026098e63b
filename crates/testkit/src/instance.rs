//! Running instances of all engines: starting, waiting until ready, stopping, crashing and pausing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// A server process, local or in a container. Methods block, and panic if the command fails.
pub(crate) trait Instance: Send + 'static {
    /// Starts the server and returns before it is ready.
    fn launch(&mut self);
    /// Whether a launched server is no longer running.
    fn has_exited(&mut self) -> bool;
    /// Ends the server in an orderly way.
    fn stop(&mut self);
    /// Kills every process of the server at once.
    fn crash(&mut self);
    fn pause(&mut self);
    fn resume(&mut self);
    fn log(&self) -> String;
    /// Makes a stopped PostgreSQL a standby from its next start on.
    fn demote(&mut self) {
        panic!("only a PostgreSQL that runs from local programs can become a standby");
    }
}

/// An [`Instance`] whose data can be erased.
pub(crate) trait Erasable: Instance {
    /// Removes the data of a stopped server.
    fn erase(&mut self);
}

/// An instance shared by blocking and async code.
pub(crate) struct Handle<I: Instance + ?Sized> {
    /// The name in messages.
    name: &'static str,
    instance: Arc<Mutex<I>>,
}

impl<I: Instance + ?Sized> Clone for Handle<I> {
    fn clone(&self) -> Self {
        Self { name: self.name, instance: Arc::clone(&self.instance) }
    }
}

impl<I: Instance + ?Sized> Handle<I> {
    pub(crate) fn new(name: &'static str, instance: Arc<Mutex<I>>) -> Self {
        Self { name, instance }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, I> {
        self.instance.lock()
    }

    pub(crate) async fn stop(&self) {
        let handle = self.clone();
        run_blocking(move || handle.lock().stop()).await;
    }

    /// Launches a stopped or crashed server and waits until `probe` finds it ready.
    pub(crate) async fn start(&self, probe: impl FnMut() -> Result<(), String> + Send + 'static) {
        let handle = self.clone();
        run_blocking(move || {
            handle.lock().launch();
            handle.wait_ready(probe).unwrap_or_else(|reason| panic!("{reason}"));
        })
        .await;
    }

    /// Blocks until `probe` succeeds for a server that was just launched.
    pub(crate) fn wait_ready(&self, mut probe: impl FnMut() -> Result<(), String>) -> Result<(), String> {
        let name = self.name;
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            let last = match probe() {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if self.lock().has_exited() {
                return Err(format!("{name} exited while starting; its log:\n{}", self.lock().log()));
            }
            if Instant::now() > end {
                let log = self.lock().log();
                return Err(format!(
                    "{name} was not ready within {READY_TIMEOUT:?}: {last}; its log:\n{log}"
                ));
            }
            // Not more often: each attempt may add a line to the server's log, and recovery after a crash can take seconds.
            std::thread::sleep(Duration::from_millis(25));
        }
    }
}

/// Runs `start` with an unused port. Retries with another port if that one was taken before the server bound it.
pub(crate) fn with_unused_port<T>(name: &str, mut start: impl FnMut(u16) -> Result<T, String>) -> T {
    for _ in 0..3 {
        match start(crate::ports::unused()) {
            Ok(started) => return started,
            Err(reason) if reason.contains("Address already in use") => {}
            Err(reason) => panic!("{reason}"),
        }
    }
    panic!("three free ports in a row were taken before {name} could bind them; see `ss -ltnp`");
}

/// Runs blocking work in another thread, so that the runtime can go on with the test's other tasks.
pub(crate) async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(output) => output,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
