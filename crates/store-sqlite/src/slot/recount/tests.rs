//! Reads and calls between the turns of a recount, and recounts that are interrupted.

use std::path::Path;
use std::time::Duration;

use weir_core::EventId;
use weir_store::StoreHealth;
use weir_store::slot::{Assign, AssignOutcome, SlotStore};
use weir_store::{LaneMetrics, LaneSettings, Lanes};

use super::*;
use crate::Sqlite;
use crate::writer::{Scheduling, WriterState};

/// More than one page of slots, and of windows.
const EVENTS: usize = 2_400;

fn pace(max: u32, window_ms: u64) -> Pace {
    Pace::new(max, Duration::from_millis(window_ms)).unwrap()
}

fn name(text: &str) -> ConfigName {
    ConfigName::parse(text).unwrap()
}

fn assignments(config: &str, prefix: &str, count: usize) -> Vec<Assign> {
    let event = |n| EventId::parse(format!("{prefix}-{n}")).unwrap();
    let assign = |n| Assign { event: event(n), config: name(config), requested: Timestamp::EPOCH };
    (0..count).map(assign).collect()
}

/// An engine with the configs `a` and `b` of 2 events a second, and [`EVENTS`] slots of `a`.
async fn engine(directory: &Path) -> Sqlite {
    let engine = Sqlite::open(directory).unwrap().with_turns_of(Duration::ZERO);
    for config in ["a", "b"] {
        engine.put_config(&name(config), pace(2, 1_000)).await.unwrap();
    }
    engine.assign_batch(assignments("a", "first", EVENTS).into()).await.unwrap();
    engine
}

/// The starts of the windows of new slots, in seconds.
fn seconds(outcomes: &[AssignOutcome]) -> Vec<i64> {
    let second = |outcome: &AssignOutcome| match outcome {
        AssignOutcome::New(slot) => slot.window_start.as_micros() / 1_000_000,
        other => panic!("a new slot, not {other:?}"),
    };
    outcomes.iter().map(second).collect()
}

async fn expect_audit(engine: &Sqlite, slots: u64) {
    let audit = engine.audit_slots().await.unwrap();
    assert_eq!((audit.slots, audit.counted), (slots, slots), "{audit:?}");
    assert!(audit.different.is_empty(), "{audit:?}");
}

/// A job that blocks the writer until the sender is used or dropped.
fn block_writer(engine: &Sqlite) -> (std::sync::mpsc::Sender<()>, impl Future<Output = ()>) {
    let (end, ended) = std::sync::mpsc::channel();
    let block = engine.inner.writer.run(move |_| ended.recv().map_err(crate::error::fault));
    (end, async { block.await.unwrap() })
}

async fn wait_until_recount_begins(engine: &Sqlite) {
    while !engine.inner.recounts.contains(&name("a")) {
        tokio::task::yield_now().await;
    }
}

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    tokio::select! {
        biased;
        outcome = future => Some(outcome),
        () = std::future::ready(()) => None,
    }
}

#[tokio::test]
async fn calls_that_wait_for_a_recount_leave_the_writer_to_others() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::begin(&engine.inner.recounts, &name("a"));
    let (mut waiting, mut refused) = (Vec::new(), 0);
    // More calls than the writer's queue holds. Each submits one job.
    for n in 0..2 * QUEUED_JOBS_MAX {
        let event = EventId::parse(format!("first-{n}")).unwrap();
        let engine = &engine;
        let mut call = Box::pin(async move { engine.release_slot(&event).await });
        assert!(poll_once(&mut call).await.is_none(), "its job is queued");
        if n % 64 == 63 {
            // Wait for the jobs before it, so that the queue does not overflow.
            engine.ping().await.unwrap();
        }
        waiting.push(call);
    }
    let mut still_waiting = Vec::new();
    for mut call in waiting {
        match poll_once(&mut call).await {
            None => still_waiting.push(call),
            Some(outcome) => {
                assert!(matches!(outcome, Err(Error::Overloaded { .. })), "{outcome:?}");
                refused += 1;
            }
        }
    }
    assert_eq!((still_waiting.len(), refused), (WAITERS_MAX, 2 * QUEUED_JOBS_MAX - WAITERS_MAX));
    assert_eq!(seconds(&engine.assign_batch(assignments("b", "other", 1).into()).await.unwrap()), [0]);
    engine.put_config(&name("c"), pace(1, 1_000)).await.unwrap();
    drop(mark);
    for call in still_waiting {
        assert!(call.await.unwrap().is_some());
    }
    let given_back = WAITERS_MAX as u64;
    expect_audit(&engine, EVENTS as u64 + 1 - given_back).await;
}

#[tokio::test]
async fn no_more_calls_wait_for_a_recount_than_the_bound() {
    let recounts = Arc::new(Recounts::default());
    let mark = Recounts::begin(&recounts, &name("a"));
    let wait = || {
        let recounts = Arc::clone(&recounts);
        tokio::spawn(async move { recounts.wait(&name("a")).await })
    };
    let waiting: Vec<_> = (0..WAITERS_MAX).map(|_| wait()).collect();
    while recounts.waiter_permits.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(wait().await.unwrap(), Err(Error::Overloaded { .. })));
    recounts.wait(&name("b")).await.unwrap();
    drop(mark);
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    recounts.wait(&name("a")).await.unwrap();
}

#[tokio::test]
async fn events_of_a_recounted_config_do_not_delay_single_calls_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::begin(&engine.inner.recounts, &name("a"));
    let settings = LaneSettings {
        lanes: 1,
        capacity: 100,
        batch_max: 10,
        in_flight: 2,
        timeout: Duration::from_secs(600),
    };
    let lanes = Lanes::start("slot", settings, LaneMetrics::default(), &[], {
        let engine = engine.clone();
        move |batch| {
            let engine = engine.clone();
            async move { engine.assign_batch(batch).await }
        }
    });
    let submit = |config: &'static str, prefix: &str| {
        let assign = assignments(config, prefix, 1).remove(0);
        lanes.submit(config, assign)
    };
    for n in 0..4 {
        let own = submit("a", &format!("own-{n}"));
        let (own, other) = tokio::join!(own, submit("b", &format!("other-{n}")));
        assert!(matches!(own.unwrap(), AssignOutcome::Recounting(_)));
        assert!(matches!(other.unwrap(), AssignOutcome::New(_)));
    }
    drop(mark);
    assert!(matches!(submit("a", "own").await.unwrap(), AssignOutcome::New(_)));
}

#[tokio::test]
async fn a_batch_with_two_configs_keeps_its_order_when_one_is_recounted() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mut mark = Some(Recounts::begin(&engine.inner.recounts, &name("a")));
    let mut batch = Vec::new();
    for n in 0..100 {
        batch.extend(assignments("a", &format!("own-{n}"), 1));
        batch.extend(assignments("b", &format!("other-{n}"), 1));
    }
    let mut job =
        super::super::assign::AssignJob::new(batch.clone().into(), Arc::clone(&engine.inner.recounts), false);
    let work = move |connection: &Connection, _: &mut WriterState, turn: &WriterTurn| {
        let progress = job.run_turn(connection, turn);
        // The recount ends after the first turn.
        mark.take();
        progress
    };
    let outcomes = engine.inner.writer.run_in_turns(Scheduling::Interleaved, work).await.unwrap();
    for (assign, outcome) in batch.iter().zip(&outcomes) {
        match outcome {
            AssignOutcome::Recounting(again) => assert_eq!((again, assign.config.as_str()), (assign, "a")),
            AssignOutcome::New(slot) => assert_eq!((&slot.event, slot.config.as_str()), (&assign.event, "b")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(outcomes.len(), batch.len());
    expect_audit(&engine, EVENTS as u64 + 100).await;
}

#[tokio::test]
async fn an_event_with_a_slot_keeps_it_and_is_answered_during_a_recount() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::begin(&engine.inner.recounts, &name("a"));
    let existing = assignments("a", "first", 1);
    let outcomes = engine.assign_batch(existing.clone().into()).await.unwrap();
    assert!(matches!(&outcomes[..], [AssignOutcome::Existing(slot)] if slot.event == existing[0].event));
    drop(mark);
}

#[tokio::test]
async fn the_first_of_two_commands_for_an_event_decides_even_during_a_recount() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::begin(&engine.inner.recounts, &name("a"));
    let batch =
        [assignments("a", "same", 1), assignments("b", "same", 1), assignments("b", "other", 1)].concat();
    let outcomes = engine.assign_batch(batch.clone().into()).await.unwrap();
    assert_eq!(outcomes[0], AssignOutcome::Recounting(batch[0].clone()));
    assert_eq!(outcomes[1], AssignOutcome::Recounting(batch[1].clone()));
    assert!(matches!(&outcomes[2], AssignOutcome::New(_)));
    drop(mark);
    let outcomes = engine.assign_batch(batch[..2].to_vec().into()).await.unwrap();
    let config = |outcome: &AssignOutcome| match outcome {
        AssignOutcome::New(slot) | AssignOutcome::Existing(slot) => slot.config.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(outcomes.iter().map(config).collect::<Vec<_>>(), ["a", "a"]);
}

#[tokio::test]
async fn versions_wait_for_a_recount_and_are_created_one_after_another() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let put = |max| {
        let engine = engine.clone();
        tokio::spawn(async move { engine.put_config(&name("a"), pace(max, 500)).await })
    };
    let puts: Vec<_> = (3..9).map(put).collect();
    let mut versions = Vec::new();
    for put in puts {
        versions.push(put.await.unwrap().unwrap().version);
    }
    versions.sort_unstable();
    assert_eq!(versions, [2, 3, 4, 5, 6, 7]);
    expect_audit(&engine, EVENTS as u64).await;
}

#[tokio::test]
async fn other_configs_continue_during_a_recount_and_events_of_its_own_wait() {
    for (new, expected) in [(pace(3, 1_000), 0), (pace(4_000, 600_000), 0), (pace(1, 1_000), 1_200)] {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path()).await;
        let (go, block) = block_writer(&engine);
        let (go_on, pause) = block_writer(&engine);
        let done = Mutex::new(Vec::new());
        let finish = |what| done.lock().push(what);
        let put = async {
            engine.put_config(&name("a"), new).await.unwrap();
            finish("put");
        };
        let own = async {
            let outcomes = engine.assign_batch(assignments("a", "second", 1).into()).await.unwrap();
            let [AssignOutcome::Recounting(assign)] = &outcomes[..] else { panic!("{outcomes:?}") };
            engine.wait_for_recount(&assign.config).await.unwrap();
            let outcomes = engine.assign_batch(vec![assign.clone()].into()).await.unwrap();
            assert_eq!(seconds(&outcomes), [expected], "it has a slot of the new pace");
        };
        let give_back = async {
            // One slot of each of the first windows, in order, which may be recounted already. A give-back that did not
            // wait would make such a counter wrong.
            for n in 0..6 {
                let event = EventId::parse(format!("first-{}", 2 * n)).unwrap();
                engine.release_slot(&event).await.unwrap().unwrap();
            }
        };
        let other = async {
            assert_eq!(
                seconds(&engine.assign_batch(assignments("b", "other", 1).into()).await.unwrap()),
                [0]
            );
            finish("other");
        };
        // All calls are queued when the recount begins.
        let begin = async {
            go.send(()).unwrap();
            wait_until_recount_begins(&engine).await;
            // Readers see the old version with all of its counters.
            let active = engine.config(&name("a")).await.unwrap().unwrap();
            assert_eq!((active.version, active.pace), (1, pace(2, 1_000)));
            expect_audit(&engine, EVENTS as u64).await;
            go_on.send(()).unwrap();
        };
        tokio::join!(block, put, pause, own, give_back, other, begin);
        assert_eq!(*done.lock(), ["other", "put"]);
        assert_eq!(engine.config(&name("a")).await.unwrap().unwrap().version, 2);
        expect_audit(&engine, EVENTS as u64 + 2 - 6).await;
    }
}

/// Recounts in a closed engine for `turns` committed turns, then stops. Returns true if the recount was finished.
fn interrupt(directory: &Path, new: Pace, turns: usize) -> bool {
    let connection = crate::connect(&directory.join(crate::DATABASE_FILE)).unwrap();
    let mut job = PutConfigJob::new(name("a"), new, Timestamp::EPOCH, Arc::default());
    for _ in 0..turns {
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        let outcome = job.run_turn(&connection, &WriterTurn::begin(Duration::ZERO)).unwrap();
        connection.execute_batch("COMMIT").unwrap();
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let (slots, counted): (usize, usize) = connection.query_row(super::super::TOTALS, [], read).unwrap();
        assert_eq!((slots, counted), (EVENTS, EVENTS), "readers see one complete version");
        if outcome.is_break() {
            return true;
        }
    }
    false
}

fn copy(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn count_rows(directory: &Path, table: &str) -> i64 {
    let connection = crate::connect(&directory.join(crate::DATABASE_FILE)).unwrap();
    connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
}

#[tokio::test]
async fn an_interrupted_recount_leaves_the_old_or_the_new_version() {
    let base = tempfile::tempdir().unwrap();
    drop(engine(base.path()).await);
    for new in [pace(1, 1_000), pace(5, 2_500)] {
        let mut versions = Vec::new();
        for turns in 0.. {
            let directory = tempfile::tempdir().unwrap();
            copy(base.path(), directory.path());
            let is_done = interrupt(directory.path(), new, turns);
            let engine = Sqlite::open(directory.path()).unwrap();
            assert_eq!(count_rows(directory.path(), "rate_limit_unused_generation"), 0);
            let (version, windows) = {
                let config = engine.config(&name("a")).await.unwrap().unwrap();
                let end = Timestamp::from_seconds(1_000_000);
                let windows = engine.windows(&name("a"), Timestamp::EPOCH, end, 10_000).await.unwrap();
                (config.version, windows)
            };
            assert!(
                windows.iter().all(|w| w.status == WindowStatus::from_count(w.count, &pace_of(version, new)))
            );
            let counters = count_rows(directory.path(), "rate_limit_window_counter");
            assert!(counters <= 2 * windows.len() as i64, "no counters of the other version remain");
            expect_audit(&engine, EVENTS as u64).await;
            // The next change leaves correct counters, whether it repeats this one or not.
            engine.put_config(&name("a"), pace(4, 500)).await.unwrap();
            expect_audit(&engine, EVENTS as u64).await;
            versions.push(version);
            if is_done {
                break;
            }
        }
        assert!(versions.len() > 6, "it takes turns: {versions:?}");
        assert!(versions.is_sorted() && versions.contains(&1) && versions.contains(&2), "{versions:?}");
    }
}

fn pace_of(version: u32, new: Pace) -> Pace {
    if version == 1 { pace(2, 1_000) } else { new }
}

/// As after an error: the job is dropped, and the engine continues.
#[tokio::test]
async fn counters_of_a_failed_recount_are_not_counted_again() {
    let base = tempfile::tempdir().unwrap();
    drop(engine(base.path()).await);
    for turns in 0..12 {
        let directory = tempfile::tempdir().unwrap();
        copy(base.path(), directory.path());
        interrupt(directory.path(), pace(5, 2_500), turns);
        assert!(interrupt(directory.path(), pace(3, 1_500), 1_000), "the next recount finishes");
        expect_audit(&Sqlite::open(directory.path()).unwrap(), EVENTS as u64).await;
    }
}
