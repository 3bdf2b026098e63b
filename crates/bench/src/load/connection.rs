//! One connection of a run: connects, sends requests in turn, counts responses, and reconnects when disconnected.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::link::{Link, ReusableTimeout};
use super::pace::{Pace, Turn};
use super::response::Answer;
use super::stats::{Failure, Stats};
use super::{Live, Run};
use crate::load::Template;

/// The pause between attempts to connect: no busy loop, but short enough to notice a restarted server quickly.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// Loads the target until the run is over. `seed` gives each connection a different order of keys.
pub(super) async fn drive(run: Arc<Run>, worker: usize, seed: u64) -> Stats {
    let mut connection = Connection {
        stats: Stats::new(),
        request: run.target.template.clone(),
        random: fastrand::Rng::with_seed(seed),
        timeout: ReusableTimeout::new(run.load.timeout),
        live: &run.live[worker],
        run: &run,
    };
    // Without a timer the connection cannot keep the schedule, so it sends nothing and the report shows the error.
    match Pace::new(&run) {
        Ok(pace) => connection.drive(pace).await,
        Err(_) => connection.failed(Failure::Connect, Instant::now()),
    }
    connection.stats
}

struct Connection<'a> {
    run: &'a Run,
    live: &'a Live,
    stats: Stats,
    request: Template,
    random: fastrand::Rng,
    timeout: ReusableTimeout,
}

impl Connection<'_> {
    async fn drive(&mut self, mut pace: Pace) {
        let mut link = None;
        let mut answered = 0;
        let mut now = Instant::now();
        while !self.run.is_over(now) {
            let Some(open) = link.as_mut() else {
                link = self.connect().await;
                answered = 0;
                now = Instant::now();
                continue;
            };
            let Some(turn) = pace.next(self.run, now).await else {
                return;
            };
            if self.run.load.keys > 1 {
                self.request.set_key(self.random.u64(..self.run.load.keys));
            }
            let outcome = self.timeout.bound(turn.sent, open.exchange(self.request.bytes())).await;
            now = Instant::now();
            answered += 1;
            let is_worn_out =
                self.run.load.requests_per_connection.is_some_and(|requests| answered >= requests.get());
            if !self.count(outcome, turn, now) || is_worn_out {
                link = None;
            }
        }
    }

    async fn connect(&mut self) -> Option<Link> {
        match Link::connect(self.run.target.address, self.run.load.timeout).await {
            Ok(link) => Some(link),
            Err(failure) => {
                self.failed(failure, Instant::now());
                sleep(RECONNECT_PAUSE).await;
                None
            }
        }
    }

    /// Counts one outcome. Returns whether the connection can be used again.
    fn count(&mut self, outcome: Result<Answer, Failure>, turn: Turn, now: Instant) -> bool {
        match outcome {
            Ok(answer) => {
                self.live.answered.fetch_add(1, Ordering::Relaxed);
                if turn.due >= self.run.measure_from {
                    self.stats.answered(answer.status, now - turn.due);
                }
                answer.keep_alive
            }
            Err(failure) => {
                self.failed(failure, turn.due);
                false
            }
        }
    }

    fn failed(&mut self, failure: Failure, due: Instant) {
        self.live.failed.fetch_add(1, Ordering::Relaxed);
        if due >= self.run.measure_from {
            self.stats.failed(failure);
        }
    }
}
