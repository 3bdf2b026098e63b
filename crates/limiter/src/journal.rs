//! Keeps what keys have spent: everything that changed is handed to a store every [`FLUSH_EVERY`], and read back at the
//! next start.
//!
//! What was spent after the last commit before a crash is forgotten: at most what was spent in [`FLUSH_EVERY`] and the time
//! that one commit takes. A write that fails is made again before anything newer, and decisions go on meanwhile. Whoever
//! cannot bear to forget what was spent waits for [`Journal::keep`], which does not wait for the next [`FLUSH_EVERY`].

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

/// How long what was spent waits before it is written.
pub const FLUSH_EVERY: Duration = Duration::from_millis(50);

/// Rows written, and read, at a time.
const PAGE: usize = 5_000;
/// How often rows are looked at for whether they are still worth keeping, and how many at a time.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
const SWEPT_PAGE: usize = 2_000;
/// Places of each shard that are looked at with them.
const SWEPT_PLACES: usize = 64;
/// How long a write that failed waits to be made again.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Journal {
    keeper: Arc<JournalWriter>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct JournalWriter {
    store: Arc<dyn TierStore>,
    memories: Arc<Memories>,
    /// Held by whoever writes or tidies, so that an older row never takes the place of a newer one.
    state: AsyncMutex<JournalState>,
    /// How much of what was taken from the memories is not written yet.
    writing: AtomicUsize,
    /// How many times changes have begun to be taken from the memories, and the last of these of which all is written.
    begun: AtomicU64,
    written: watch::Sender<u64>,
    /// Rings when somebody waits for what was spent to be written.
    wake: Notify,
    /// Since when something could not be written.
    failing_since: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct JournalState {
    /// Taken from the memories and not written yet.
    unwritten: Vec<SpentRow>,
    /// The row after which tidying goes on.
    tidied: Option<(u32, String)>,
}

impl std::fmt::Debug for JournalWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Journal {
    pub(crate) async fn open(store: Arc<dyn TierStore>, memories: Arc<Memories>) -> Result<Self> {
        restore(&*store, &memories).await?;
        let keeper = Arc::new(JournalWriter {
            store,
            memories,
            state: AsyncMutex::default(),
            writing: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            written: watch::Sender::new(0),
            wake: Notify::new(),
            failing_since: Mutex::default(),
        });
        let task = tokio::spawn(run(Arc::clone(&keeper)));
        Ok(Self { keeper, task: Mutex::new(Some(task)) })
    }

    /// Writes everything that was spent up to now and ends. When the store does not take it, it is lost with the process.
    pub(crate) async fn close(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            // What it was writing is still on the desk.
            let _ = task.await;
        }
        if let Err(error) = self.keeper.flush().await {
            tracing::error!(error = %error.with_causes(), "what was spent last could not be kept");
        }
    }

    /// Waits until everything that was spent up to now is written. All who wait at the same time share a commit.
    pub(crate) async fn keep(&self) {
        // What was spent before this is seen by whoever begins after it: both go through the lock of the key's shard.
        let enough = self.keeper.begun.load(Ordering::SeqCst) + 1;
        let mut written = self.keeper.written.subscribe();
        self.keeper.wake.notify_one();
        // The sender is the keeper's, which lives as long as this.
        let _ = written.wait_for(|written| *written >= enough).await;
    }

    /// How many keys wait to be written.
    pub(crate) fn unsaved(&self) -> usize {
        // In this order: what leaves the memories is counted as being written before.
        let waiting = self.keeper.memories.changed_len();
        waiting + self.keeper.writing.load(Ordering::SeqCst)
    }

    /// For how long nothing could be written.
    pub(crate) fn unsaved_for(&self) -> Option<Duration> {
        self.keeper.failing_since().map(|since| since.elapsed())
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().take() {
            task.abort();
        }
    }
}

async fn run(keeper: Arc<JournalWriter>) {
    let mut swept = Instant::now();
    loop {
        let _ = tokio::time::timeout(FLUSH_EVERY, keeper.wake.notified()).await;
        let mut outcome = keeper.flush().await;
        if outcome.is_ok() && swept.elapsed() >= SWEEP_EVERY {
            swept = Instant::now();
            outcome = keeper.tidy().await;
        }
        if keeper.note(&outcome) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl JournalWriter {
    async fn flush(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        // What failed before goes first; what is newer stays in the memories until then.
        self.write(&mut state).await?;
        self.writing.store(self.memories.changed_len(), Ordering::SeqCst);
        let begun = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        state.unwritten = self.take_changes();
        self.write(&mut state).await?;
        self.written.send_replace(begun);
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

    /// Every key stands there once, so the order of rows does not matter.
    async fn write(&self, state: &mut JournalState) -> Result<()> {
        self.writing.store(state.unwritten.len(), Ordering::SeqCst);
        while !state.unwritten.is_empty() {
            let rest = state.unwritten.len().saturating_sub(PAGE);
            self.store.save_spent(state.unwritten[rest..].to_vec()).await?;
            state.unwritten.truncate(rest);
            self.writing.store(rest, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Deletes some of the rows that time has made as good as new, and drops some such keys.
    async fn tidy(&self) -> Result<()> {
        let now = self.memories.clock.now();
        self.memories.limits.sweep(SWEPT_PLACES, now);
        self.memories.tiers.sweep(SWEPT_PLACES, now);
        let mut state = self.state.lock().await;
        let page = self.store.load_spent(state.tidied.take(), SWEPT_PAGE).await?;
        if page.len() == SWEPT_PAGE {
            state.tidied = page.last().map(|row| (row.scope, row.key.clone()));
        }
        // While the desk is ours, rows are as they were last written; what was spent since will be written again.
        let old = page.into_iter().filter(|row| row.record.as_ref().is_none_or(|kept| is_over(kept, now)));
        let old: Vec<_> = old.map(|row| SpentRow { record: None, ..row }).collect();
        if old.is_empty() { Ok(()) } else { self.store.save_spent(old).await }
    }

    /// Tells of a failure once, and of its end. Answers whether it goes on.
    fn note(&self, outcome: &Result<()>) -> bool {
        let mut failing = self.failing_since.lock();
        match (outcome, *failing) {
            (Err(error), None) => {
                *failing = Some(Instant::now());
                tracing::warn!(error = %error.with_causes(), "what limits have spent cannot be kept; trying again");
            }
            (Ok(()), Some(_)) => {
                *failing = None;
                tracing::info!("what limits have spent is kept again");
            }
            _ => {}
        }
        failing.is_some()
    }

    fn failing_since(&self) -> Option<Instant> {
        *self.failing_since.lock()
    }
}

fn is_over(kept: &SpentRecord, now: Timestamp) -> bool {
    match kept {
        SpentRecord::Limit(limit, spent) => limit.is_unspent(spent, now),
        SpentRecord::Tier(limits, spent) => limits.rule().is_unspent(spent, now),
    }
}

/// Rules are shared by all their keys, so each is made once.
#[derive(Default)]
struct Rules {
    limits: HashMap<(u32, Limit), Arc<ScopedRule<Limit>>>,
    tiers: HashMap<TierLimits, Arc<ScopedRule<TierRule>>>,
}

async fn restore(store: &dyn TierStore, memories: &Memories) -> Result<()> {
    let (mut rules, mut after) = (Rules::default(), None);
    loop {
        let page = store.load_spent(after.take(), PAGE).await?;
        let is_last = page.len() < PAGE;
        after = page.last().map(|row| (row.scope, row.key.clone()));
        let now = memories.clock.now();
        for SpentRow { scope, key, record, saved_at } in page {
            let record = record.map(|record| match saved_at {
                // The clock has stepped back since it was written.
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
