//! Many concurrent callers: the limit holds, no call fails, and the queue agrees with the outcomes.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_store::Result;
use weir_store::quota::{SendMessage, SendOutcome};

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{
    configure, find_quota, is_accepted, limits, message_id, outcome_letters, queue_audit, run_concurrently,
    send, sends, texts_by_key, user,
};

/// Sends batches concurrently, each in its own task.
async fn send_concurrently<H: HasQuota>(h: &H, batches: Vec<Vec<SendMessage>>) -> Vec<Vec<SendOutcome>> {
    let answers = run_concurrently(batches.into_iter().map(|batch| {
        let quota = h.quota();
        async move { quota.send_batch(batch.into()).await }
    }));
    answers.await.into_iter().collect::<Result<_>>().expect("parallel batches must all succeed")
}

fn count_accepted<'a>(outcomes: impl IntoIterator<Item = &'a SendOutcome>) -> usize {
    outcomes.into_iter().filter(|outcome| is_accepted(outcome)).count()
}

pub async fn parallel_batches_never_pass_the_limit<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 50, 1).await;
    configure(&h, "bob", 30, 1).await;
    let batch = [sends("alice", 10), sends("bob", 3)].concat();
    let answers = send_concurrently(&h, vec![batch; 40]).await;
    let accepted_in = |range: std::ops::Range<usize>| {
        answers.iter().map(|batch| count_accepted(&batch[range.clone()])).sum::<usize>()
    };
    assert_eq!(
        (accepted_in(0..10), accepted_in(10..13)),
        (50, 30),
        "exactly the limit is accepted, however many callers there are"
    );
    assert_eq!(
        find_quota(&h, "alice").await.map(|row| row.current_count),
        Some(50),
        "the row counts what was accepted"
    );
    assert_eq!(queue_audit(&h).await.accepted, 80, "the queue holds what was accepted");
}

pub async fn parallel_sends_at_the_end_of_a_window_never_pass_the_limit<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 7, 1).await;
    for window in 1..=3 {
        let answers = send_concurrently(&h, vec![sends("alice", 1); 30]).await;
        assert_eq!(count_accepted(answers.iter().flatten()), 7, "only one new window begins");
        assert_eq!(queue_audit(&h).await.accepted, 7 * window, "the queue holds what was accepted");
        h.clock().advance(Duration::from_secs(60));
    }
}

pub async fn parallel_batches_naming_users_in_any_order_all_succeed<H: HasQuota>() {
    let h = H::open().await;
    let names: Vec<String> = (0..20).map(|n| format!("user-{n}")).collect();
    for name in &names {
        configure(&h, name, 25, 1).await;
    }
    let mut rng = fastrand::Rng::with_seed(7);
    let batches = (0..40).map(|_| {
        let mut batch: Vec<_> = names.iter().map(|name| send(name, "hello")).collect();
        rng.shuffle(&mut batch);
        batch
    });
    let answers = send_concurrently(&h, batches.collect()).await;
    assert_eq!(count_accepted(answers.iter().flatten()), 20 * 25, "each user's limit is reached and held");
}

pub async fn parallel_first_configurations_leave_one_row<H: HasQuota>() {
    let h = H::open().await;
    let answers = run_concurrently((1..=20).map(|n| {
        let quota = h.quota();
        async move { quota.configure(&user("alice"), limits(n, 1)).await }
    }));
    for (n, answer) in (1..).zip(answers.await) {
        let row = answer.expect("parallel configurations must all succeed");
        assert_eq!(row.limits, limits(n, 1), "each caller is answered with their own limits");
    }
    assert_eq!(h.quota().audit().await.expect("audit must succeed").users, 1, "there is one row");
}

pub async fn configuring_and_removing_while_sending_keeps_the_books<H: HasQuota>() {
    let h = H::open().await;
    let answers = run_concurrently((0..60).map(|n| {
        let (quota, name) = (h.quota(), format!("user-{}", n / 3 % 4));
        async move {
            match n % 3 {
                0 => quota.configure(&user(&name), limits(3, 1)).await.map(|_| Vec::new()),
                1 if n % 5 == 0 => quota.remove(&user(&name)).await.map(|_| Vec::new()),
                _ => quota.send_batch(sends(&name, 5).into()).await,
            }
        }
    }));
    let outcomes = answers.await.into_iter().collect::<Result<Vec<_>>>().expect("everything must succeed");
    for batch in &outcomes {
        let letters = outcome_letters(batch);
        let allowed = ["", "AAADD", "AADDD", "ADDDD", "DDDDD", "NNNNN"].contains(&letters.as_str());
        assert!(allowed, "a batch is decided atomically, but one was {letters}");
    }
    let accepted = count_accepted(outcomes.iter().flatten());
    assert_eq!(queue_audit(&h).await.accepted, accepted as u64, "the queue holds exactly what was accepted");
    let over_limit = h.quota().audit().await.expect("audit must succeed").over_limit;
    assert_eq!(over_limit, [""; 0], "nobody is over the limit");
}

pub async fn the_queue_keeps_the_order_in_which_parallel_sends_were_accepted<H: HasQuota>() {
    let h = H::open().await;
    for name in ["alice", "bob", "carol"] {
        configure(&h, name, 1_000, 1).await;
    }
    let batches: Vec<_> = (0..30)
        .map(|task| {
            let order = [["alice", "bob", "carol"], ["carol", "alice", "bob"], ["bob", "carol", "alice"]];
            order[task % 3].map(|name| send(name, &format!("{task}"))).to_vec()
        })
        .collect();
    let answers = send_concurrently(&h, batches.clone()).await;
    let mut expected: BTreeMap<String, Vec<(u32, String)>> = BTreeMap::new();
    for (command, outcome) in batches.iter().flatten().zip(answers.iter().flatten()) {
        let SendOutcome::Accepted { grant, .. } = outcome else {
            panic!("every send is within the limit: {:?}", message_id(outcome));
        };
        let sent = (1_000 - grant.remaining, command.message.to_string());
        expected.entry(command.user.to_string()).or_default().push(sent);
    }
    let delivered = texts_by_key(&Claims::drain(&h).await);
    for (name, mut sent) in expected {
        sent.sort();
        let mut order: Vec<String> = sent.into_iter().map(|(_, text)| text).collect();
        let mut delivered = delivered[&name].clone();
        if !H::counts_and_queues_atomically() {
            order.sort();
            delivered.sort();
        }
        assert_eq!(
            delivered, order,
            "{name}'s messages are enqueued in the order in which they were counted"
        );
    }
}
