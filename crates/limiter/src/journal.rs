//! Saves the usage of keys: every [`FLUSH_EVERY`], everything that changed is written to a store, which is read at the
//! next start.
//!
//! A crash loses what was spent since the last commit: at most the usage of [`FLUSH_EVERY`] plus the duration of one
//! commit. A failed write is retried before anything newer is written, and decisions continue meanwhile. Callers that
//! must not lose usage wait for [`Journal::wait_until_saved`], which triggers a flush at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use tokio::task::JoinHandle;
use weir_core::Timestamp;
use weir_core::tier::{Limit, Rule, ScopedRule, TierLimits, TierRule};
use weir_store::tier::{SpentRecord, SpentRow, TIER_SCOPE, TierStore};
use weir_store::{Error, Result};

use crate::local_limiter::Memories;

/// How long usage waits before it is written.
pub const FLUSH_EVERY: Duration = Duration::from_millis(50);

/// Rows written or read at a time.
const PAGE: usize = 5_000;
/// How often stored rows are checked for expiry, and how many at a time.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
const SWEPT_PAGE: usize = 2_000;
/// Cells of each shard that are swept at the same time.
const SWEPT_CELLS: usize = 64;
/// How long a failed write waits before it is retried.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Journal {
    writer: Arc<JournalWriter>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct JournalWriter {
    store: Arc<dyn TierStore>,
    memories: Arc<Memories>,
    /// Locked while rows are written or deleted, so that an older row never replaces a newer one.
    state: AsyncMutex<JournalState>,
    /// The number of keys taken from the memories and not written yet.
    unwritten_len: AtomicUsize,
    /// The number of flushes started, and the last one that was written completely.
    flushes_started: AtomicU64,
    flushes_written: watch::Sender<u64>,
    /// Notified when a caller waits for its usage to be written.
    wake: Notify,
    /// When writing started to fail; `None` while it works.
    failing_since: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct JournalState {
    /// Rows taken from the memories and not written yet.
    unwritten: Vec<SpentRow>,
    /// The row after which the next check for expiry continues.
    expiry_cursor: Option<(u32, String)>,
}

impl std::fmt::Debug for JournalWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalWriter").finish_non_exhaustive()
    }
}

impl Journal {
    pub(crate) async fn open(store: Arc<dyn TierStore>, memories: Arc<Memories>) -> Result<Self> {
        restore(&*store, &memories).await?;
        let writer = Arc::new(JournalWriter {
            store,
            memories,
            state: AsyncMutex::default(),
            unwritten_len: AtomicUsize::new(0),
            flushes_started: AtomicU64::new(0),
            flushes_written: watch::Sender::new(0),
            wake: Notify::new(),
            failing_since: Mutex::default(),
        });
        let task = tokio::spawn(run(Arc::clone(&writer)));
        Ok(Self { writer, task: Mutex::new(Some(task)) })
    }

    /// Stops the task and writes all usage. If the store fails, that usage is lost with the process.
    pub(crate) async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            // The rows it was writing are still in the state.
            let _ = task.await;
        }
        if let Err(error) = self.writer.flush().await {
            tracing::error!(error = %error.with_causes(), "cannot save the last usage of limits; it is lost when the process ends");
        }
    }

    /// Waits until all usage so far is written. Concurrent callers share a commit.
    pub(crate) async fn wait_until_saved(&self) {
        // A flush that starts after this sees the usage of the caller: both lock the key's shard.
        let needed = self.writer.flushes_started.load(Ordering::SeqCst) + 1;
        let mut written = self.writer.flushes_written.subscribe();
        self.writer.wake.notify_one();
        // The sender lives as long as `self`.
        let _ = written.wait_for(|written| *written >= needed).await;
    }

    /// Returns the number of keys that are not written yet.
    pub(crate) fn unsaved(&self) -> usize {
        // The order matters: keys are counted as being written before they leave the memories.
        let waiting = self.writer.memories.changed_len();
        waiting + self.writer.unwritten_len.load(Ordering::SeqCst)
    }

    /// Returns for how long writes have been failing.
    pub(crate) fn unsaved_for(&self) -> Option<Duration> {
        self.writer.failing_since().map(|since| since.elapsed())
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().take() {
            task.abort();
        }
    }
}

async fn run(writer: Arc<JournalWriter>) {
    let mut swept_at = Instant::now();
    loop {
        let _ = tokio::time::timeout(FLUSH_EVERY, writer.wake.notified()).await;
        let mut outcome = writer.flush().await;
        if outcome.is_ok() && swept_at.elapsed() >= SWEEP_EVERY {
            swept_at = Instant::now();
            outcome = writer.delete_expired().await;
        }
        if writer.log_outcome(&outcome) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl JournalWriter {
    async fn flush(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        // Failed rows go first; newer changes stay in the memories until then.
        self.write(&mut state).await?;
        self.unwritten_len.store(self.memories.changed_len(), Ordering::SeqCst);
        let flush = self.flushes_started.fetch_add(1, Ordering::SeqCst) + 1;
        state.unwritten = self.take_changes();
        self.write(&mut state).await?;
        self.flushes_written.send_replace(flush);
        Ok(())
    }

    fn take_changes(&self) -> Vec<SpentRow> {
        let saved_at = Some(self.memories.clock.now());
        let limits = self.memories.limits.changes().map(|change| SpentRow {
            scope: change.policy.scope,
            key: String::from(&*change.id),
            record: SpentRecord::of_limit(&change.policy.rule, change.spent),
            saved_at,
        });
        let tiers = self.memories.tiers.changes().map(|change| SpentRow {
            scope: change.policy.scope,
            key: String::from(&*change.id),
            record: SpentRecord::of_tier(&change.policy.rule, change.spent),
            saved_at,
        });
        limits.chain(tiers).collect()
    }

    /// Every key occurs once, so the order of rows does not matter.
    async fn write(&self, state: &mut JournalState) -> Result<()> {
        self.unwritten_len.store(state.unwritten.len(), Ordering::SeqCst);
        while !state.unwritten.is_empty() {
            let rest = state.unwritten.len().saturating_sub(PAGE);
            self.store.save_spent(state.unwritten[rest..].to_vec()).await?;
            state.unwritten.truncate(rest);
            self.unwritten_len.store(rest, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Deletes some expired rows, and drops some idle keys.
    async fn delete_expired(&self) -> Result<()> {
        let now = self.memories.clock.now();
        self.memories.limits.sweep(SWEPT_CELLS, now);
        self.memories.tiers.sweep(SWEPT_CELLS, now);
        let mut state = self.state.lock().await;
        let page = self.store.load_spent(state.expiry_cursor.take(), SWEPT_PAGE).await?;
        if page.len() == SWEPT_PAGE {
            state.expiry_cursor = page.last().map(|row| (row.scope, row.key.clone()));
        }
        // While the state is locked, rows are as last written; what was spent since will be written again.
        let expired =
            page.into_iter().filter(|row| row.record.as_ref().is_none_or(|record| is_expired(record, now)));
        let expired: Vec<_> = expired.map(|row| SpentRow { record: None, ..row }).collect();
        if expired.is_empty() { Ok(()) } else { self.store.save_spent(expired).await }
    }

    /// Logs the start and the end of a failure once each. Returns whether writes are failing.
    fn log_outcome(&self, outcome: &Result<()>) -> bool {
        let mut failing = self.failing_since.lock();
        match (outcome, *failing) {
            (Err(error), None) => {
                *failing = Some(Instant::now());
                tracing::warn!(error = %error.with_causes(), "cannot save the usage of limits; retrying until the store works again");
            }
            (Ok(()), Some(_)) => {
                *failing = None;
                tracing::info!("the usage of limits is saved again");
            }
            _ => {}
        }
        failing.is_some()
    }

    fn failing_since(&self) -> Option<Instant> {
        *self.failing_since.lock()
    }
}

fn is_expired(record: &SpentRecord, now: Timestamp) -> bool {
    match record {
        SpentRecord::Limit(limit, spent) => limit.is_unspent(spent, now),
        SpentRecord::Tier(limits, spent) => limits.rule().is_unspent(spent, now),
    }
}

/// The rules of restored keys. All keys of a rule share one instance.
#[derive(Default)]
struct SharedRules {
    limits: HashMap<(u32, Limit), Arc<ScopedRule<Limit>>>,
    tiers: HashMap<TierLimits, Arc<ScopedRule<TierRule>>>,
}

async fn restore(store: &dyn TierStore, memories: &Memories) -> Result<()> {
    let (mut rules, mut after) = (SharedRules::default(), None);
    loop {
        let page = store.load_spent(after.take(), PAGE).await?;
        let is_last = page.len() < PAGE;
        after = page.last().map(|row| (row.scope, row.key.clone()));
        let now = memories.clock.now();
        for SpentRow { scope, key, record, saved_at } in page {
            let record = record.map(|record| match saved_at {
                // The clock has stepped back since the row was written.
                Some(saved_at) if saved_at > now => record.moved_earlier(saved_at.since(now)),
                _ => record,
            });
            let restored = match record {
                Some(SpentRecord::Limit(limit, spent)) => {
                    let rule = rules.limits.entry((scope, limit));
                    let rule = rule.or_insert_with(|| Arc::new(ScopedRule { scope, rule: limit }));
                    memories.limits.restore(rule, &key, spent, now)
                }
                Some(SpentRecord::Tier(limits, spent)) => {
                    let rule = rules.tiers.entry(limits);
                    let rule = rule
                        .or_insert_with(|| Arc::new(ScopedRule { scope: TIER_SCOPE, rule: limits.rule() }));
                    memories.tiers.restore(rule, &key, spent, now)
                }
                None => Ok(()),
            };
            restored.map_err(|full| Error::failed("tier memory", full))?;
        }
        if is_last {
            return Ok(());
        }
    }
}
