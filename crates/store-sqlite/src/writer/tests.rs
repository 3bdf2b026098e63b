//! Groups of jobs, turns, and failed jobs.

use weir_core::UserId;

use super::*;

fn writer() -> Writer {
    let mut connection = Connection::open_in_memory().unwrap();
    connection.execute_batch("CREATE TABLE t (n INTEGER PRIMARY KEY)").unwrap();
    crate::migrate::run(&mut connection).unwrap();
    Writer::start(connection, EngineCalls::new(ENGINE)).unwrap()
}

async fn insert(writer: &Writer, n: i64) -> Result<usize> {
    writer.run(move |connection| connection.execute("INSERT INTO t VALUES (?1)", [n])).await
}

async fn rows(writer: &Writer) -> i64 {
    writer.run(|c| c.query_row("SELECT count(*) FROM t", [], |row| row.get(0))).await.unwrap()
}

#[tokio::test]
async fn a_failed_job_does_not_affect_the_others() {
    let writer = writer();
    let (a, twice, b) = tokio::join!(
        insert(&writer, 1),
        writer.run(|c| {
            c.execute("INSERT INTO t VALUES (2)", [])?;
            c.execute("INSERT INTO t VALUES (2)", [])
        }),
        insert(&writer, 3),
    );
    assert!(a.is_ok() && b.is_ok());
    assert!(!twice.unwrap_err().is_transient());
    assert_eq!(rows(&writer).await, 2, "the failed job left nothing behind");
}

#[tokio::test]
async fn a_failed_first_job_does_not_affect_the_others() {
    let writer = writer();
    assert!(insert(&writer, 1).await.is_ok());
    let (again, other) = tokio::join!(insert(&writer, 1), insert(&writer, 2));
    assert!(again.is_err() && other.is_ok());
    assert_eq!(rows(&writer).await, 2);
}

#[tokio::test]
async fn a_job_that_panics_does_not_stop_the_writer() {
    let writer = writer();
    let panicked: Result<()> = writer
        .run(|c| {
            c.execute("INSERT INTO t VALUES (1)", [])?;
            panic!("a fault in a job")
        })
        .await;
    assert!(panicked.is_err());
    assert_eq!(rows(&writer).await, 0);
    assert!(insert(&writer, 1).await.is_ok());
}

#[tokio::test]
async fn the_work_of_a_dropped_caller_is_done() {
    let writer = writer();
    {
        let call = insert(&writer, 1);
        tokio::pin!(call);
        // The first poll submits the job; then the future is dropped.
        let _ = futures_poll_once(call.as_mut()).await;
    }
    assert_eq!(rows(&writer).await, 1);
}

#[tokio::test]
async fn others_have_the_writer_between_the_turns_of_a_long_job() {
    let writer = writer();
    writer.set_turn(Duration::ZERO);
    let rows_of_job = |connection: &Connection| -> rusqlite::Result<i64> {
        connection.query_row("SELECT count(*) FROM t WHERE n < 0", [], |row| row.get(0))
    };
    let mut n = 0;
    let (started, mut turns) = (std::sync::Arc::new(tokio::sync::Notify::new()), 0);
    let notify = std::sync::Arc::clone(&started);
    // It continues until another job has run.
    let long = writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
        assert!(turn.has_time());
        notify.notify_one();
        n -= 1;
        connection.execute("INSERT INTO t VALUES (?1)", [n])?;
        let is_other_done = connection.prepare("SELECT 1 FROM t WHERE n = 100")?.exists([])?;
        turns += 1;
        Ok(if is_other_done { ControlFlow::Break(turns) } else { ControlFlow::Continue(()) })
    });
    let other = async {
        started.notified().await;
        insert(&writer, 100).await
    };
    let (turns, other) = tokio::join!(long, other);
    assert!(turns.unwrap() > 1 && other.is_ok());
    assert!(writer.run(rows_of_job).await.unwrap() > 1);
}

#[tokio::test]
async fn fifo_jobs_do_not_overtake_a_long_one() {
    let writer = writer();
    writer.set_turn(Duration::ZERO);
    let insert_all = |numbers: std::ops::Range<i64>| {
        let mut numbers = numbers.into_iter();
        writer.run_in_turns(Scheduling::Fifo, move |connection, _, _| {
            let Some(n) = numbers.next() else { return Ok(ControlFlow::Break(())) };
            connection.execute("INSERT INTO t VALUES (?1 + 100 * (SELECT count(*) FROM t))", [n])?;
            Ok(ControlFlow::Continue(()))
        })
    };
    let (one, two, other) = tokio::join!(insert_all(0..5), insert_all(5..10), insert(&writer, 9_999));
    assert!(one.is_ok() && two.is_ok() && other.is_ok());
    let read = "SELECT n % 100 FROM t WHERE n < 9999 ORDER BY n";
    let read = move |connection: &Connection| {
        connection.prepare(read)?.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<Vec<i64>>>()
    };
    assert_eq!(writer.run(read).await.unwrap(), (0..10).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_job_that_others_wait_for_has_every_other_turn() {
    let writer = writer();
    let turns = std::sync::Arc::new(Mutex::new(Vec::new()));
    let (release, released) = mpsc::channel::<()>();
    let mut block = Box::pin(writer.run(move |_| released.recv().map_err(crate::error::fault)));
    assert!(futures_poll_once(block.as_mut()).await.is_none());
    writer.set_turn(Duration::ZERO);
    let mut jobs = Vec::new();
    let others = (0..4).map(|_| (Scheduling::Interleaved, "other"));
    for (order, name) in others.chain([(Scheduling::Prioritized, "prioritized")]) {
        let (turns, mut left) = (std::sync::Arc::clone(&turns), 8);
        let mut job = Box::pin(writer.run_in_turns(order, move |_, _, _| {
            left -= 1;
            turns.lock().push(name);
            Ok(if left > 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        }));
        assert!(futures_poll_once(job.as_mut()).await.is_none());
        jobs.push(job);
    }
    release.send(()).unwrap();
    block.await.unwrap();
    for job in jobs {
        job.await.unwrap();
    }
    let turns = turns.lock();
    let indexes =
        turns.iter().enumerate().filter(|(_, name)| **name == "prioritized").map(|(index, _)| index);
    let indexes: Vec<usize> = indexes.collect();
    // In the group of its first turn another unfinished job had a turn, too.
    assert!(indexes.windows(2).skip(1).all(|indexes| indexes[1] - indexes[0] == 2), "{turns:?}");
    assert_eq!((indexes.len(), turns.len()), (8, 40));
}

#[tokio::test]
async fn jobs_that_waited_for_a_long_one_share_a_commit() {
    const JOBS: i64 = 50;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file.db");
    let mut connection = Connection::open(&path).unwrap();
    connection.execute_batch("CREATE TABLE t (n INTEGER PRIMARY KEY)").unwrap();
    crate::migrate::run(&mut connection).unwrap();
    // SQLite counts the transactions that changed a file in bytes 24 to 27 of its header.
    let commits = || {
        let header = std::fs::read(&path).unwrap();
        u32::from_be_bytes(header[24..28].try_into().unwrap())
    };
    let before = commits();
    let writer = Writer::start(connection, EngineCalls::new(ENGINE)).unwrap();
    writer.set_turn(Duration::from_secs(600));
    let (release, released) = mpsc::channel::<()>();
    let mut turns = 0;
    let mut long = Box::pin(writer.run_in_turns(Scheduling::Fifo, move |connection, _, _| {
        turns += 1;
        connection.execute("INSERT INTO t VALUES (?1)", [-turns])?;
        if turns == 1 {
            released.recv().unwrap();
        }
        Ok(if turns == 1 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }));
    assert!(futures_poll_once(long.as_mut()).await.is_none());
    let mut jobs = Vec::new();
    for n in 0..JOBS {
        let mut job = Box::pin(writer.run_in_turns(Scheduling::Fifo, move |connection, _, _| {
            connection.execute("INSERT INTO t VALUES (?1)", [n]).map(ControlFlow::Break)
        }));
        assert!(futures_poll_once(job.as_mut()).await.is_none());
        jobs.push(job);
    }
    release.send(()).unwrap();
    long.await.unwrap();
    for job in jobs {
        job.await.unwrap();
    }
    let commits = commits() - before;
    assert!(commits < 5, "{commits} commits for {JOBS} jobs");
}

#[tokio::test]
async fn a_job_received_when_the_transaction_ends_is_answered_with_the_cause() {
    let writer = writer();
    writer.set_turn(Duration::from_secs(600));
    let (release, released) = mpsc::channel::<()>();
    let (start, started) = mpsc::channel::<()>();
    let mut turns = 0;
    let mut long = Box::pin(writer.run_in_turns(Scheduling::Fifo, move |connection, _, _| {
        turns += 1;
        connection.execute("INSERT INTO t VALUES (?1)", [-turns])?;
        start.send(()).unwrap();
        released.recv().unwrap();
        Ok(if turns == 1 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }));
    assert!(futures_poll_once(long.as_mut()).await.is_none());
    started.recv().unwrap();
    // A FIFO job behind the long one. Like a full disk, it rolls back the transaction of the whole group.
    let mut ends = Box::pin(writer.run_in_turns(Scheduling::Fifo, |connection, _, _| {
        connection.execute_batch("ROLLBACK")?;
        connection.execute("INSERT INTO missing VALUES (1)", []).map(ControlFlow::Break)
    }));
    assert!(futures_poll_once(ends.as_mut()).await.is_none());
    release.send(()).unwrap();
    started.recv().unwrap();
    // Received after the second turn of the long job, when the other FIFO job is next.
    let mut late = Box::pin(insert(&writer, 1));
    assert!(futures_poll_once(late.as_mut()).await.is_none());
    release.send(()).unwrap();
    assert!(long.await.is_err() && ends.await.is_err());
    let error = late.await.unwrap_err().with_causes().to_string();
    assert!(error.contains("missing"), "{error}");
}

/// Adds one to the counts of the first users.
async fn count_users(writer: &Writer, users: usize) -> Result<()> {
    let count = move |connection: &Connection, counts: &mut QuotaRows| {
        counts.refresh(connection)?;
        let users: Vec<_> = (0..users).map(|n| UserId::parse(format!("user-{n}")).unwrap()).collect();
        let mut changed = Vec::new();
        for user in &users {
            let mut row = counts.find(connection, user)?.unwrap();
            row.current_count += 1;
            changed.push((user, row));
        }
        counts.save(connection, &changed)
    };
    writer.run_with_quota(count).await
}

async fn counted(writer: &Writer, user: &'static str) -> u32 {
    let find = move |connection: &Connection, counts: &mut QuotaRows| {
        counts.refresh(connection)?;
        counts.find(connection, &UserId::parse(user).unwrap())
    };
    writer.run_with_quota(find).await.unwrap().unwrap().current_count
}

async fn add_users(writer: &Writer) {
    let add = |connection: &Connection| {
        let insert = "INSERT INTO rate_limit_store VALUES (?1, 100, 1, 0, 0, 0)";
        (0..40).try_for_each(|n| connection.execute(insert, [format!("user-{n}")]).map(drop))
    };
    writer.run(add).await.unwrap();
}

#[tokio::test]
async fn journals_are_not_loaded_again_when_a_job_fails() {
    let writer = writer();
    add_users(&writer).await;
    let (_, truncated, failed, _) = tokio::join!(
        count_users(&writer, 40),
        // Reading the journal again would now fail with a truncated batch.
        writer.run(|c| c.execute("UPDATE quota_journal SET entries = x'0500616c'", [])),
        writer.run(|c| c.execute("INSERT INTO missing VALUES (1)", [])),
        count_users(&writer, 20),
    );
    assert_eq!((truncated.unwrap(), failed.is_err()), (1, true));
    // The only job of its group.
    assert!(writer.run(|c| c.execute("INSERT INTO missing VALUES (1)", [])).await.is_err());
    assert_eq!((counted(&writer, "user-0").await, counted(&writer, "user-39").await), (2, 1));
}

#[tokio::test]
async fn counts_of_a_failed_job_are_rolled_back() {
    let writer = writer();
    add_users(&writer).await;
    count_users(&writer, 40).await.unwrap();
    let fails = || {
        writer.run_with_quota(|connection, counts| {
            let user = UserId::parse("user-0").unwrap();
            let mut row = counts.find(connection, &user)?.unwrap();
            row.current_count += 50;
            counts.save(connection, &[(&user, row)])?;
            connection.execute("INSERT INTO missing VALUES (1)", [])
        })
    };
    let (before, failed, after) = tokio::join!(count_users(&writer, 1), fails(), count_users(&writer, 1));
    assert!(before.is_ok() && failed.is_err() && after.is_ok());
    assert_eq!(counted(&writer, "user-0").await, 3);
    // Like a full disk: the transaction of the whole group is rolled back, with the counts of other jobs.
    writer.set_turn(Duration::from_secs(600));
    let (release, released) = mpsc::channel::<()>();
    let mut first = Box::pin(writer.run(move |_| released.recv().map_err(crate::error::fault)));
    assert!(futures_poll_once(first.as_mut()).await.is_none());
    let mut counts = Box::pin(count_users(&writer, 30));
    assert!(futures_poll_once(counts.as_mut()).await.is_none());
    let mut ends = Box::pin(writer.run(|connection| {
        connection.execute_batch("ROLLBACK")?;
        connection.execute("INSERT INTO missing VALUES (1)", [])
    }));
    assert!(futures_poll_once(ends.as_mut()).await.is_none());
    release.send(()).unwrap();
    assert!(first.await.is_err() && counts.await.is_err() && ends.await.is_err());
    assert_eq!((counted(&writer, "user-0").await, counted(&writer, "user-29").await), (3, 1));
}

#[tokio::test]
async fn an_error_in_a_later_turn_keeps_the_earlier_turns() {
    let writer = writer();
    let mut n = 0;
    let fails = writer.run_in_turns(Scheduling::Interleaved, move |connection, _, _| {
        n = (n + 1).min(3);
        connection.execute("INSERT INTO t VALUES (?1)", [n])?;
        Ok(ControlFlow::<()>::Continue(()))
    });
    assert!(fails.await.is_err());
    assert_eq!(rows(&writer).await, 3);
}

#[tokio::test]
async fn a_full_disk_is_reported_until_a_write_succeeds() {
    let writer = writer();
    assert_eq!(writer.disk().problem(), None);
    let limit = |pages: i64| {
        let set = format!("PRAGMA max_page_count = {pages}");
        writer.run(move |connection| connection.query_row(&set, [], |row| row.get::<_, i64>(0)))
    };
    limit(1).await.unwrap();
    let large = || {
        let insert = "INSERT OR REPLACE INTO heartbeat (id, at) VALUES (1, zeroblob(1000000))";
        writer.run(move |connection| connection.execute(insert, []))
    };
    assert!(large().await.unwrap_err().is_transient());
    assert!(writer.disk().problem().is_some_and(|problem| problem.contains("full")));
    assert_eq!(rows(&writer).await, 0);
    assert!(writer.disk().problem().is_some(), "a read is no proof that writes succeed");
    limit(1_000_000).await.unwrap();
    large().await.unwrap();
    assert_eq!(writer.disk().problem(), None);
}

#[tokio::test]
async fn no_more_jobs_wait_than_the_bound() {
    let writer = std::sync::Arc::new(writer());
    writer.set_turn(Duration::ZERO);
    let is_over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut waiting = Vec::new();
    // Every job stays unfinished until it may end.
    let refused = loop {
        let (writer, is_over) = (std::sync::Arc::clone(&writer), std::sync::Arc::clone(&is_over));
        let mut job = Box::pin(async move {
            let work = move |_: &Connection, _: &mut WriterState, _: &WriterTurn| {
                let is_over = is_over.load(Ordering::Relaxed);
                Ok(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            };
            writer.run_in_turns(Scheduling::Interleaved, work).await
        });
        match futures_poll_once(job.as_mut()).await {
            Some(refused) => break refused,
            None => waiting.push(job),
        }
        assert!(waiting.len() <= 2 * QUEUED_JOBS_MAX, "at most the queue and as many unfinished jobs");
    };
    assert!(matches!(refused, Err(Error::Overloaded { .. })));
    is_over.store(true, Ordering::Relaxed);
    for job in waiting {
        job.await.unwrap();
    }
}

async fn futures_poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    let mut future = Some(future);
    std::future::poll_fn(move |context| {
        let polled = future.take().map(|f| f.poll(context));
        std::task::Poll::Ready(match polled {
            Some(std::task::Poll::Ready(value)) => Some(value),
            _ => None,
        })
    })
    .await
}
