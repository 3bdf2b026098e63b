use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::*;

fn settings(lanes: u16, capacity: usize, batch_max: usize) -> LaneSettings {
    LaneSettings { lanes, capacity, batch_max, in_flight: 1, timeout: Duration::from_secs(2) }
}

/// An engine that records the batches it runs and finishes each one when the test adds a permit.
struct GatedEngine {
    batches: Mutex<Vec<Vec<u32>>>,
    started: Notify,
    gate: Semaphore,
}

impl GatedEngine {
    fn new() -> Arc<Self> {
        Arc::new(Self { batches: Mutex::default(), started: Notify::new(), gate: Semaphore::new(0) })
    }

    fn lanes(self: &Arc<Self>, settings: LaneSettings) -> Arc<Lanes<u32, u32>> {
        let engine = Arc::clone(self);
        Arc::new(Lanes::start("test", settings, LaneMetrics::default(), &[], move |batch: Batch<u32>| {
            let (engine, batch) = (Arc::clone(&engine), batch.take());
            async move {
                engine.batches.lock().push(batch.clone());
                engine.started.notify_one();
                engine.gate.acquire().await.expect("the gate is never closed").forget();
                Ok(batch.into_iter().map(|n| n * 10).collect())
            }
        }))
    }

    fn batches(&self) -> Vec<Vec<u32>> {
        self.batches.lock().clone()
    }
}

/// Starts a call and returns when it waits in its lane.
async fn call(lanes: &Arc<Lanes<u32, u32>>, n: u32) -> tokio::task::JoinHandle<Result<u32>> {
    let lanes = Arc::clone(lanes);
    let handle = tokio::spawn(async move { lanes.submit("key", n).await });
    // On a current-thread runtime, one yield runs the new task up to its first await.
    tokio::task::yield_now().await;
    handle
}

#[tokio::test]
async fn calls_that_arrive_during_a_batch_form_the_next_batch() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 16, 16));
    let first = call(&lanes, 1).await;
    engine.started.notified().await;
    let (second, third) = (call(&lanes, 2).await, call(&lanes, 3).await);
    engine.gate.add_permits(2);
    assert_eq!(first.await.unwrap().unwrap(), 10);
    assert_eq!(second.await.unwrap().unwrap(), 20);
    assert_eq!(third.await.unwrap().unwrap(), 30);
    assert_eq!(engine.batches(), [vec![1], vec![2, 3]]);
}

#[tokio::test]
async fn no_batch_is_larger_than_allowed() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 16, 2));
    let mut calls = vec![call(&lanes, 0).await];
    engine.started.notified().await;
    for n in 1..=5 {
        calls.push(call(&lanes, n).await);
    }
    engine.gate.add_permits(10);
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(engine.batches(), [vec![0], vec![1, 2], vec![3, 4], vec![5]]);
}

#[tokio::test]
async fn a_full_lane_refuses_at_once_and_still_answers_waiting_calls() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 2, 16));
    let running = call(&lanes, 1).await;
    engine.started.notified().await;
    let (a, b) = (call(&lanes, 2).await, call(&lanes, 3).await);
    let refused = lanes.submit("key", 4).await.unwrap_err();
    assert!(matches!(refused, Error::Overloaded { lane: "test" }), "{refused:?}");
    assert!(refused.is_transient());
    assert_eq!(lanes.lanes[0].metrics.rejected.get(), 1);
    engine.gate.add_permits(2);
    for accepted in [running, a, b] {
        assert!(accepted.await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn a_caller_that_disconnects_neither_fails_nor_blocks_the_batch() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 16, 16));
    let in_flight = call(&lanes, 1).await;
    engine.started.notified().await;
    let (dropped, waiting) = (call(&lanes, 2).await, call(&lanes, 3).await);
    in_flight.abort();
    dropped.abort();
    assert!(in_flight.await.unwrap_err().is_cancelled());
    assert!(dropped.await.unwrap_err().is_cancelled());
    engine.gate.add_permits(2);
    assert_eq!(waiting.await.unwrap().unwrap(), 30);
    assert_eq!(engine.batches(), [vec![1], vec![3]], "a command dropped before its batch is not run");
    assert_eq!(lanes.lanes[0].metrics.abandoned.get(), 1);
}

#[tokio::test]
async fn draining_answers_every_accepted_call_and_refuses_later_ones() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 16, 16));
    let running = call(&lanes, 1).await;
    engine.started.notified().await;
    let waiting = call(&lanes, 2).await;
    let draining = tokio::spawn({
        let lanes = Arc::clone(&lanes);
        async move { lanes.drain().await }
    });
    tokio::task::yield_now().await;
    assert!(!draining.is_finished());
    engine.gate.add_permits(2);
    draining.await.unwrap();
    assert!(running.await.unwrap().is_ok());
    assert!(waiting.await.unwrap().is_ok());
    assert!(matches!(lanes.submit("key", 3).await, Err(Error::ShuttingDown)));
}

#[tokio::test]
async fn a_failed_batch_fails_only_its_own_callers() {
    let calls = Arc::new(AtomicUsize::new(0));
    let lanes = Lanes::start("test", settings(1, 16, 16), LaneMetrics::default(), &[], {
        let calls = Arc::clone(&calls);
        move |batch: Batch<u32>| {
            let batch = batch.take();
            let nth = calls.fetch_add(1, Ordering::SeqCst);
            async move {
                match nth {
                    0 => Err(Error::unavailable("engine", "down")),
                    1 => panic!("a fault in the engine"),
                    2 => Ok(Vec::new()),
                    _ => Ok(batch),
                }
            }
        }
    });
    assert!(lanes.submit("key", 1).await.unwrap_err().is_transient());
    assert!(!lanes.submit("key", 1).await.unwrap_err().is_transient());
    assert!(!lanes.submit("key", 1).await.unwrap_err().is_transient());
    assert_eq!(lanes.submit("key", 1).await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_key_keeps_its_order_and_each_call_its_own_answer() {
    let executed: Arc<Mutex<Vec<(u32, u32)>>> = Arc::default();
    let lanes = Arc::new(Lanes::start("test", settings(4, 1_024, 7), LaneMetrics::default(), &[], {
        let executed = Arc::clone(&executed);
        move |batch: Batch<(u32, u32)>| {
            let batch = batch.take();
            executed.lock().extend(&batch);
            async move {
                tokio::task::yield_now().await;
                Ok(batch)
            }
        }
    }));
    let callers: Vec<_> = (0..20)
        .map(|key| {
            let lanes = Arc::clone(&lanes);
            tokio::spawn(async move {
                for n in 0..200 {
                    assert_eq!(lanes.submit(&key.to_string(), (key, n)).await.unwrap(), (key, n));
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    for key in 0..20 {
        let of_key: Vec<_> = executed.lock().iter().filter(|(k, _)| *k == key).map(|(_, n)| *n).collect();
        assert_eq!(of_key, (0..200).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn calls_in_and_behind_a_batch_that_hangs_are_answered_in_time() {
    // The timeout is short enough to wait for; the test does not measure durations.
    let engine = GatedEngine::new();
    let lanes = engine.lanes(LaneSettings { timeout: Duration::from_millis(60), ..settings(1, 16, 16) });
    let hangs = call(&lanes, 1).await;
    engine.started.notified().await;
    let behind = call(&lanes, 2).await;
    for late in [hangs, behind] {
        assert!(late.await.unwrap().unwrap_err().is_transient());
    }
    let next = call(&lanes, 3).await;
    engine.gate.add_permits(2);
    assert_eq!(next.await.unwrap().unwrap(), 30, "the lane continues when the engine does");
    assert_eq!(engine.batches(), [vec![1], vec![3]], "a call that timed out while waiting is not run");
}

#[tokio::test]
async fn batches_in_flight_together_start_in_order_and_no_more_than_allowed() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(LaneSettings { in_flight: 2, ..settings(1, 16, 16) });
    let mut calls = Vec::new();
    for n in 0..2 {
        calls.push(call(&lanes, n).await);
        engine.started.notified().await;
    }
    for n in 2..5 {
        calls.push(call(&lanes, n).await);
    }
    assert_eq!(engine.batches(), [vec![0], vec![1]], "the third waits for one of the two to be done");
    engine.gate.add_permits(1);
    engine.started.notified().await;
    assert_eq!(engine.batches(), [vec![0], vec![1], vec![2, 3, 4]]);
    engine.gate.add_permits(2);
    for (n, call) in (0..).zip(calls) {
        assert_eq!(call.await.unwrap().unwrap(), n * 10);
    }
}

/// A batch at the engine, and where to send its outcomes.
type OfferedBatch = (Batch<u32>, oneshot::Sender<Result<Vec<u32>>>);

/// An engine whose batches the test takes.
struct ManualEngine {
    offered: Mutex<Vec<OfferedBatch>>,
    arrived: Notify,
}

impl ManualEngine {
    fn lanes(settings: LaneSettings) -> (Arc<Self>, Arc<Lanes<u32, u32>>) {
        let engine = Arc::new(Self { offered: Mutex::default(), arrived: Notify::new() });
        let lanes = Lanes::start("test", settings, LaneMetrics::default(), &[], {
            let engine = Arc::clone(&engine);
            move |batch| {
                let (done, outcomes) = oneshot::channel();
                engine.offered.lock().push((batch, done));
                engine.arrived.notify_one();
                async move { outcomes.await.expect("the test answers") }
            }
        });
        (engine, Arc::new(lanes))
    }

    /// Waits for the first batch that is offered.
    async fn next(&self) -> OfferedBatch {
        loop {
            if let Some(first) = self.take_first() {
                return first;
            }
            self.arrived.notified().await;
        }
    }

    fn take_first(&self) -> Option<OfferedBatch> {
        let mut offered = self.offered.lock();
        (!offered.is_empty()).then(|| offered.remove(0))
    }
}

fn two_at_once() -> LaneSettings {
    LaneSettings { in_flight: 2, ..settings(1, 16, 4) }
}

#[tokio::test]
async fn a_batch_that_waits_at_the_engine_grows_until_it_is_taken() {
    let (engine, lanes) = ManualEngine::lanes(two_at_once());
    let mut calls = vec![call(&lanes, 0).await];
    let (first, first_done) = engine.next().await;
    assert_eq!(first.take(), [0]);
    calls.push(call(&lanes, 1).await);
    let (second, second_done) = engine.next().await;
    for n in 2..7 {
        calls.push(call(&lanes, n).await);
    }
    assert!(engine.offered.lock().is_empty(), "later calls join the batch that waits");
    first_done.send(Ok(vec![0])).unwrap();
    assert_eq!(calls.remove(0).await.unwrap().unwrap(), 0);
    assert_eq!(second.take(), [1, 2, 3, 4], "and no more than allowed");
    let (third, third_done) = engine.next().await;
    assert_eq!(third.take(), [5, 6]);
    third_done.send(Ok(vec![5, 6])).unwrap();
    second_done.send(Ok(vec![1, 2, 3, 4])).unwrap();
    for (n, call) in (1..).zip(calls) {
        assert_eq!(call.await.unwrap().unwrap(), n);
    }
}

#[tokio::test]
async fn a_batch_that_is_never_taken_fails_its_calls() {
    let (engine, lanes) = ManualEngine::lanes(two_at_once());
    let (one, two) = (call(&lanes, 1).await, call(&lanes, 2).await);
    let (untaken, done) = engine.next().await;
    done.send(Err(Error::unavailable("engine", "down"))).unwrap();
    for failed in [one, two] {
        assert!(failed.await.unwrap().unwrap_err().is_transient());
    }
    let next = call(&lanes, 3).await;
    assert!(untaken.take().is_empty(), "a failed batch gets no other calls");
    let (batch, done) = engine.next().await;
    assert_eq!(batch.take(), [3]);
    done.send(Ok(vec![3])).unwrap();
    assert_eq!(next.await.unwrap().unwrap(), 3, "the lane continues");
}

#[tokio::test]
async fn a_batch_whose_callers_have_all_disconnected_is_empty() {
    let (engine, lanes) = ManualEngine::lanes(two_at_once());
    let dropped = call(&lanes, 1).await;
    let (batch, done) = engine.next().await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    assert!(batch.take().is_empty());
    let next = call(&lanes, 2).await;
    done.send(Ok(Vec::new())).unwrap();
    let (batch, done) = engine.next().await;
    assert_eq!(batch.take(), [2]);
    done.send(Ok(vec![2])).unwrap();
    assert_eq!(next.await.unwrap().unwrap(), 2);
    assert_eq!(lanes.lanes[0].metrics.abandoned.get(), 1);
}

#[tokio::test]
async fn draining_waits_for_a_batch_that_is_not_taken_yet() {
    let (engine, lanes) = ManualEngine::lanes(two_at_once());
    let waiting = call(&lanes, 1).await;
    let (batch, done) = engine.next().await;
    let draining = tokio::spawn({
        let lanes = Arc::clone(&lanes);
        async move { lanes.drain().await }
    });
    tokio::task::yield_now().await;
    assert!(!draining.is_finished());
    assert_eq!(batch.take(), [1]);
    done.send(Ok(vec![1])).unwrap();
    draining.await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), 1);
}

/// A thread with its own runtime, like those that serve HTTP.
struct OtherThread {
    runtime: Handle,
    end: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl OtherThread {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (handle, end) = (runtime.handle().clone(), CancellationToken::new());
        let ended = end.clone();
        let thread = std::thread::spawn(move || runtime.block_on(ended.cancelled()));
        Self { runtime: handle, end, thread: Some(thread) }
    }
}

impl Drop for OtherThread {
    fn drop(&mut self) {
        self.end.cancel();
        self.thread.take().unwrap().join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_and_lanes_may_be_on_different_runtimes() {
    let threads = [OtherThread::start(), OtherThread::start()];
    let runtimes: Vec<Handle> = threads.iter().map(|thread| thread.runtime.clone()).collect();
    let double = |batch: Batch<u32>| async move { Ok(batch.take().into_iter().map(|n| n * 2).collect()) };
    let lanes =
        Arc::new(Lanes::start("test", settings(3, 1_024, 7), LaneMetrics::default(), &runtimes, double));
    let homes = [runtimes[0].clone(), runtimes[1].clone(), Handle::current()];
    let callers: Vec<_> = (0..300_u32)
        .map(|n| {
            let lanes = Arc::clone(&lanes);
            let call = async move { lanes.submit(&(n % 10).to_string(), n).await.unwrap() };
            homes[n as usize % homes.len()].spawn(call)
        })
        .collect();
    for (n, caller) in (0..).zip(callers) {
        assert_eq!(caller.await.unwrap(), n * 2);
    }
    lanes.drain().await;
}

#[tokio::test]
async fn callers_whose_runtime_has_ended_do_not_block_others() {
    let engine = GatedEngine::new();
    let lanes = engine.lanes(settings(1, 16, 16));
    let ending = OtherThread::start();
    let their_lanes = Arc::clone(&lanes);
    let abandoned = ending.runtime.spawn(async move { their_lanes.submit("key", 1).await });
    engine.started.notified().await;
    drop(ending);
    assert!(abandoned.await.unwrap_err().is_cancelled());
    let own = call(&lanes, 2).await;
    engine.gate.add_permits(2);
    assert_eq!(own.await.unwrap().unwrap(), 20);
}
