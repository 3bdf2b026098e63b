//! Sends one request per key as fast as the server accepts them, to set up a benchmark.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::task::JoinSet;

use super::link::{Link, ReusableTimeout};
use super::{Live, Target};
use crate::report::Progress;

const CONNECTIONS: u64 = 64;
/// Requests in flight on a connection: enough to keep it busy, few enough to fit any socket buffer.
const PIPELINE: u64 = 16;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends the target's request once for each key below `keys` and requires a 2xx answer to every one.
pub async fn configure(target: &Target, keys: u64) -> Result<()> {
    let work =
        Arc::new(Work { target: target.clone(), keys, next: AtomicU64::new(0), live: [Live::default()] });
    let mut connections = JoinSet::new();
    for _ in 0..CONNECTIONS.min(keys.div_ceil(PIPELINE)) {
        connections.spawn(feed(Arc::clone(&work)));
    }
    let all = async {
        while let Some(done) = connections.join_next().await {
            done.context("a configuring task panicked")??;
        }
        Ok(())
    };
    Progress::counted(&target.name, keys).watch(&work.live, all).await
}

/// Shared by the connections.
struct Work {
    target: Target,
    keys: u64,
    next: AtomicU64,
    live: [Live; 1],
}

impl Work {
    fn take_batch(&self) -> Range<u64> {
        let first = self.next.fetch_add(PIPELINE, Ordering::Relaxed);
        first..(first + PIPELINE).min(self.keys)
    }
}

/// Sends one batch of keys after another until none is left.
async fn feed(work: Arc<Work>) -> Result<()> {
    let Target { name, address, template } = &work.target;
    let lost = || format!("{name} at {address} failed");
    let mut link = Link::connect(*address, TIMEOUT).await.with_context(lost)?;
    let mut timeout = ReusableTimeout::new(TIMEOUT);
    let mut template = template.clone();
    let mut bytes = Vec::new();
    loop {
        let batch = work.take_batch();
        if batch.is_empty() {
            return Ok(());
        }
        bytes.clear();
        for key in batch.clone() {
            template.set_key(key);
            bytes.extend_from_slice(template.bytes());
        }
        timeout.bound(Instant::now(), link.send(&bytes)).await.with_context(lost)?;
        for key in batch {
            let answer = timeout.bound(Instant::now(), link.receive()).await.with_context(lost)?;
            ensure!((200..300).contains(&answer.status), "{name} answered {} for key {key}", answer.status);
            work.live[0].answered.fetch_add(1, Ordering::Relaxed);
        }
    }
}
