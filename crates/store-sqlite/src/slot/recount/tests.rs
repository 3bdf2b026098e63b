//! What others see and do between the turns of a recount, and what is left when it breaks off.

use std::path::Path;
use std::time::Duration;

use weir_core::EventId;
use weir_store::slot::{Assign, AssignOutcome, SlotStore};

use super::*;
use crate::Sqlite;

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
            assert_eq!(seconds(&outcomes), [expected], "it goes by the new pace");
        };
        let give_back = async {
            // One of each of the first windows, one after the other: were one not to wait, it would already be counted.
            for n in 0..6 {
                let event = EventId::parse(format!("first-{}", 2 * n)).unwrap();
                engine.give_slot_back(&event).await.unwrap().unwrap();
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
            assert!(windows.iter().all(|w| w.status == WindowStatus::of(w.count, &pace_of(version, new))));
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
