//! The progress line of a running measurement. Drawn on terminals only, so that logs and pipes stay clean.

use std::io::{self, IsTerminal as _, Write as _};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::interval;

use super::table::grouped;
use crate::load::Live;

const TICK: Duration = Duration::from_millis(250);

/// How far along the work is.
#[derive(Debug, Clone, Copy)]
enum Scale {
    Time { start: Instant, end: Instant },
    Count { total: u64 },
}

pub(crate) struct Progress {
    name: String,
    scale: Scale,
}

impl Progress {
    pub(crate) fn timed(name: &str, start: Instant, end: Instant) -> Self {
        Self { name: name.to_owned(), scale: Scale::Time { start, end } }
    }

    pub(crate) fn counted(name: &str, total: u64) -> Self {
        Self { name: name.to_owned(), scale: Scale::Count { total } }
    }

    /// Runs `work` and draws the line from `live` meanwhile.
    pub(crate) async fn watch<T>(&self, live: &[Live], work: impl Future<Output = T>) -> T {
        if !io::stderr().is_terminal() {
            return work.await;
        }
        let mut work = pin!(work);
        let mut tick = interval(TICK);
        let mut before = (Instant::now(), 0);
        loop {
            tokio::select! {
                done = &mut work => {
                    draw("");
                    return done;
                }
                _ = tick.tick() => {
                    let now = (Instant::now(), sum(live, |counts| &counts.answered));
                    let elapsed_s = (now.0 - before.0).as_secs_f64().max(0.001);
                    let rate = (now.1 - before.1) as f64 / elapsed_s;
                    draw(&self.line(now, rate, sum(live, |counts| &counts.failed)));
                    before = now;
                }
            }
        }
    }

    fn line(&self, (now, answered): (Instant, u64), rate: f64, errors: u64) -> String {
        let place = match self.scale {
            Scale::Time { start, end } => {
                let total_s = (end - start).as_secs_f64();
                format!("{:.1}/{total_s:.1} s", now.duration_since(start).as_secs_f64().min(total_s))
            }
            Scale::Count { total } => format!("{}/{}", grouped(answered as f64), grouped(total as f64)),
        };
        format!("{}  {place}  {}/s  {errors} errors", self.name, grouped(rate))
    }
}

fn sum(live: &[Live], count: fn(&Live) -> &AtomicU64) -> u64 {
    live.iter().map(|counts| count(counts).load(Ordering::Relaxed)).sum()
}

/// Replaces the line. A failure to write must not end the measurement.
fn draw(line: &str) {
    let mut stderr = io::stderr().lock();
    drop(write!(stderr, "\r{line}\x1b[K").and_then(|()| stderr.flush()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_shows_time_rate_and_errors() {
        let start = Instant::now();
        let progress = Progress::timed("weir", start, start + Duration::from_secs(12));
        let line = progress.line((start + Duration::from_millis(4200), 1), 89_123.4, 3);
        assert_eq!(line, "weir  4.2/12.0 s  89,123/s  3 errors");
        let late = progress.line((start + Duration::from_secs(20), 1), 0.0, 0);
        assert_eq!(late, "weir  12.0/12.0 s  0/s  0 errors");
    }

    #[test]
    fn the_line_shows_a_count_where_there_is_one() {
        let line = Progress::counted("users", 10_000).line((Instant::now(), 2500), 9000.0, 0);
        assert_eq!(line, "users  2,500/10,000  9,000/s  0 errors");
    }
}
