//! What others see and do between the turns of a recount, and what is left when it breaks off.

use std::path::Path;
use std::time::Duration;

use weir_core::EventId;
use weir_store::StoreHealth;
use weir_store::slot::{Assign, AssignOutcome, SlotStore};
use weir_store::{LaneMetrics, LaneSettings, Lanes};

use super::*;
use crate::Sqlite;
use crate::writer::{Order, Unflushed};

/// More than one page of slots, and of windows.
const EVENTS: usize = 2_400;

fn pace(max: u32, window_ms: u64) -> Pace {
    Pace::new(max, Duration::from_millis(window_ms)).unwrap()
}

fn name(text: &str) -> ConfigName {
    ConfigName::parse(text).unwrap()
}

fn wishes(config: &str, prefix: &str, count: usize) -> Vec<Assign> {
    let event = |n| EventId::parse(format!("{prefix}-{n}")).unwrap();
    let wish = |n| Assign { event: event(n), config: name(config), requested: Timestamp::EPOCH };
    (0..count).map(wish).collect()
}

/// An engine with two configs of a pace of 2 in a second, and events for `a`.
async fn engine(directory: &Path) -> Sqlite {
    let engine = Sqlite::open(directory).unwrap().with_turns_of(Duration::ZERO);
    for config in ["a", "b"] {
        engine.put_config(&name(config), pace(2, 1_000)).await.unwrap();
    }
    engine.assign_batch(wishes("a", "first", EVENTS).into()).await.unwrap();
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

async fn expect_books(engine: &Sqlite, slots: u64) {
    let books = engine.audit_slots().await.unwrap();
    assert_eq!((books.slots, books.counted), (slots, slots), "{books:?}");
    assert!(books.different.is_empty(), "{books:?}");
}

/// A job that keeps the writer until it is told to end.
fn block_writer(engine: &Sqlite) -> (std::sync::mpsc::Sender<()>, impl Future<Output = ()>) {
    let (end, ended) = std::sync::mpsc::channel();
    let block = engine.inner.writer.run(move |_| ended.recv().map_err(crate::error::fault));
    (end, async { block.await.unwrap() })
}

async fn wait_until_marked(engine: &Sqlite) {
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
async fn however_many_wait_for_a_recount_the_writer_is_there_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::mark(&engine.inner.recounts, &name("a"));
    let (mut waiting, mut refused) = (Vec::new(), 0);
    // More than the writer has places for, each of which comes to it once.
    for n in 0..2 * WAITING_MAX {
        let event = EventId::parse(format!("first-{n}")).unwrap();
        let engine = &engine;
        let mut call = Box::pin(async move { engine.release_slot(&event).await });
        assert!(poll_once(&mut call).await.is_none(), "it is with the writer");
        if n % 64 == 63 {
            // Behind it.
            engine.ping().await.unwrap();
        }
        waiting.push(call);
    }
    let mut left = Vec::new();
    for mut call in waiting {
        match poll_once(&mut call).await {
            None => left.push(call),
            Some(outcome) => {
                assert!(matches!(outcome, Err(Error::Overloaded { .. })), "{outcome:?}");
                refused += 1;
            }
        }
    }
    assert_eq!((left.len(), refused), (WAITERS_MAX, 2 * WAITING_MAX - WAITERS_MAX));
    assert_eq!(seconds(&engine.assign_batch(wishes("b", "other", 1).into()).await.unwrap()), [0]);
    engine.put_config(&name("c"), pace(1, 1_000)).await.unwrap();
    drop(mark);
    for call in left {
        assert!(call.await.unwrap().is_some());
    }
    let given_back = WAITERS_MAX as u64;
    expect_books(&engine, EVENTS as u64 + 1 - given_back).await;
}

#[tokio::test]
async fn no_more_calls_wait_for_a_recount_than_the_bound() {
    let recounts = Arc::new(Recounts::default());
    let mark = Recounts::mark(&recounts, &name("a"));
    let wait = || {
        let recounts = Arc::clone(&recounts);
        tokio::spawn(async move { recounts.wait(&name("a")).await })
    };
    let waiting: Vec<_> = (0..WAITERS_MAX).map(|_| wait()).collect();
    while recounts.places.available_permits() > 0 {
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
async fn events_of_a_config_that_is_counted_do_not_hold_up_single_calls_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::mark(&engine.inner.recounts, &name("a"));
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
        let wish = wishes(config, prefix, 1).remove(0);
        lanes.submit(config, wish)
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
async fn a_batch_with_two_configs_is_answered_in_its_order_and_what_waits_stays_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mut mark = Some(Recounts::mark(&engine.inner.recounts, &name("a")));
    let mut batch = Vec::new();
    for n in 0..100 {
        batch.extend(wishes("a", &format!("own-{n}"), 1));
        batch.extend(wishes("b", &format!("other-{n}"), 1));
    }
    let mut job = super::super::assign::Assignment::new(
        batch.clone().into(),
        Arc::clone(&engine.inner.recounts),
        false,
    );
    let work = move |connection: &Connection, _: &mut Unflushed, turn: &Turn| {
        let progress = job.work(connection, turn);
        // The recount ends behind the first turn.
        mark.take();
        progress
    };
    let outcomes = engine.inner.writer.in_turns(Order::Any, work).await.unwrap();
    for (wish, outcome) in batch.iter().zip(&outcomes) {
        match outcome {
            AssignOutcome::Recounting(again) => assert_eq!((again, wish.config.as_str()), (wish, "a")),
            AssignOutcome::New(slot) => assert_eq!((&slot.event, slot.config.as_str()), (&wish.event, "b")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(outcomes.len(), batch.len());
    expect_books(&engine, EVENTS as u64 + 100).await;
}

#[tokio::test]
async fn an_event_that_has_a_slot_keeps_it_and_is_answered_while_its_config_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::mark(&engine.inner.recounts, &name("a"));
    let known = wishes("a", "first", 1);
    let outcomes = engine.assign_batch(known.clone().into()).await.unwrap();
    assert!(matches!(&outcomes[..], [AssignOutcome::Existing(slot)] if slot.event == known[0].event));
    drop(mark);
}

#[tokio::test]
async fn of_two_lines_for_one_event_the_first_decides_also_when_its_config_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let mark = Recounts::mark(&engine.inner.recounts, &name("a"));
    let batch = [wishes("a", "same", 1), wishes("b", "same", 1), wishes("b", "other", 1)].concat();
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
async fn versions_of_a_config_that_is_counted_wait_and_are_made_one_after_the_other() {
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
    expect_books(&engine, EVENTS as u64).await;
}

#[tokio::test]
async fn others_go_on_while_a_config_is_counted_and_its_own_events_wait() {
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
            let outcomes = engine.assign_batch(wishes("a", "second", 1).into()).await.unwrap();
            let [AssignOutcome::Recounting(wish)] = &outcomes[..] else { panic!("{outcomes:?}") };
            engine.wait_for_recount(&wish.config).await.unwrap();
            let outcomes = engine.assign_batch(vec![wish.clone()].into()).await.unwrap();
            assert_eq!(seconds(&outcomes), [expected], "it goes by the new pace");
        };
        let give_back = async {
            // One of each of the first windows, one after the other: were one not to wait, it would already be counted.
            for n in 0..6 {
                let event = EventId::parse(format!("first-{}", 2 * n)).unwrap();
                engine.release_slot(&event).await.unwrap().unwrap();
            }
        };
        let other = async {
            assert_eq!(seconds(&engine.assign_batch(wishes("b", "other", 1).into()).await.unwrap()), [0]);
            finish("other");
        };
        // All of them wait for the writer when it begins.
        let begin = async {
            go.send(()).unwrap();
            wait_until_marked(&engine).await;
            // What readers see is the version before, whole.
            let active = engine.config(&name("a")).await.unwrap().unwrap();
            assert_eq!((active.version, active.pace), (1, pace(2, 1_000)));
            expect_books(&engine, EVENTS as u64).await;
            go_on.send(()).unwrap();
        };
        tokio::join!(block, put, pause, own, give_back, other, begin);
        assert_eq!(*done.lock(), ["other", "put"]);
        assert_eq!(engine.config(&name("a")).await.unwrap().unwrap().version, 2);
        expect_books(&engine, EVENTS as u64 + 2 - 6).await;
    }
}

/// Works on a closed engine for so many turns, each committed, and breaks off. True when that was all.
fn break_off(directory: &Path, new: Pace, turns: usize) -> bool {
    let connection = crate::connect(&directory.join(crate::DATABASE_FILE)).unwrap();
    let mut job = NewVersion::new(name("a"), new, Timestamp::EPOCH, Arc::default());
    for _ in 0..turns {
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        let outcome = job.work(&connection, &Turn::begin(Duration::ZERO)).unwrap();
        connection.execute_batch("COMMIT").unwrap();
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let (slots, counted): (usize, usize) = connection.query_row(super::super::TOTALS, [], read).unwrap();
        assert_eq!((slots, counted), (EVENTS, EVENTS), "readers see one version, whole");
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
async fn a_recount_that_breaks_off_leaves_the_version_before_or_the_new_one() {
    let base = tempfile::tempdir().unwrap();
    drop(engine(base.path()).await);
    for new in [pace(1, 1_000), pace(5, 2_500)] {
        let mut versions = Vec::new();
        for turns in 0.. {
            let directory = tempfile::tempdir().unwrap();
            copy(base.path(), directory.path());
            let is_done = break_off(directory.path(), new, turns);
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
            let empty_or_counted = count_rows(directory.path(), "rate_limit_window_counter");
            assert!(empty_or_counted <= 2 * windows.len() as i64, "nothing is left of the other version");
            expect_books(&engine, EVENTS as u64).await;
            // The next change, whether it is the same or not, comes out right.
            engine.put_config(&name("a"), pace(4, 500)).await.unwrap();
            expect_books(&engine, EVENTS as u64).await;
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

/// As after an error: the job is gone, and the engine goes on.
#[tokio::test]
async fn what_a_recount_that_failed_has_counted_is_not_counted_again() {
    let base = tempfile::tempdir().unwrap();
    drop(engine(base.path()).await);
    for turns in 0..12 {
        let directory = tempfile::tempdir().unwrap();
        copy(base.path(), directory.path());
        break_off(directory.path(), pace(5, 2_500), turns);
        assert!(break_off(directory.path(), pace(3, 1_500), 1_000), "the next one comes to its end");
        expect_books(&Sqlite::open(directory.path()).unwrap(), EVENTS as u64).await;
    }
}
