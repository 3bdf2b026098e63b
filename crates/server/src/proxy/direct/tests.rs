use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

use super::super::pool::Pool;
use super::*;
use crate::outbound::connect::Stream;

const ASK: &[u8] = b"GET /x HTTP/1.1\r\n\r\n";
/// Far beyond anything that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// What lies between both sides of a connection at most.
const BETWEEN_MAX: usize = 2 << 20;

/// A connection, and the upstream's side of it. The system holds little of what goes to and fro.
async fn connected() -> (Line, TcpStream) {
    let [listening, connecting] = [(); 2].map(|()| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_send_buffer_size(64 << 10).unwrap();
        socket.set_recv_buffer_size(64 << 10).unwrap();
        socket
    });
    listening.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listening.listen(1).unwrap();
    let near = connecting.connect(listener.local_addr().unwrap()).await.unwrap();
    let (far, _) = listener.accept().await.unwrap();
    far.set_nodelay(true).unwrap();
    (Line::new(Stream::Plain(near)), far)
}

/// What a caller gets of an answer.
#[derive(Debug, PartialEq, Eq)]
struct Got {
    status: u16,
    body: Vec<u8>,
    /// Whether it ended as it should.
    is_whole: bool,
    /// Whether the connection was kept for another call.
    is_kept: bool,
}

/// Takes an answer as the proxy does; the problem, where there is none.
async fn take(mut line: Line) -> Result<Got, String> {
    line.alarm.begin(Instant::now(), PATIENCE);
    let (mut talk, pool, stop) = (Talk::new(line, ASK.to_vec()), Pool::new(1), CancellationToken::new());
    let over = |line: &mut Line, context: &mut Context<'_>| line.alarm.poll(context, &stop).map(late);
    let head = match talk.head(false, over).await {
        Ok(head) => head,
        Err(Failure::Final(problem)) => return Err(problem.to_string()),
        Err(Failure::Unsent(ask)) => {
            assert_eq!(ask, ASK);
            return Err("unsent".to_owned());
        }
    };
    let mut body = head.body;
    if let Some(whole) = talk.take_whole(&mut body) {
        let is_kept = head.is_kept && talk.into_line().is_some();
        return Ok(Got { status: head.status.as_u16(), body: whole.to_vec(), is_whole: true, is_kept });
    }
    let around = Around { pool: pool.clone(), caller: None, idle_timeout: PATIENCE, stop };
    let mut flow = Flow::new(talk, body, head.is_kept, around);
    let (mut body, mut is_whole) = (Vec::new(), true);
    while let Some(frame) = flow.frame().await {
        match frame.map(|frame| frame.into_data()) {
            Ok(Ok(data)) => body.extend_from_slice(&data),
            Ok(Err(_trailers)) => {}
            Err(_cut_off) => is_whole = false,
        }
    }
    // One that the other side has left since is kept, but not taken out again.
    let is_kept = pool.has_kept();
    Ok(Got { status: head.status.as_u16(), body, is_whole, is_kept })
}

/// What becomes of an answer that comes in pieces of so many bytes, after which the upstream leaves.
async fn told(text: &[u8], size: usize) -> Result<Got, String> {
    let (line, mut far) = connected().await;
    let text = text.to_vec();
    let upstream = tokio::spawn(async move {
        let mut ask = vec![0; ASK.len()];
        far.read_exact(&mut ask).await.unwrap();
        assert_eq!(ask, ASK);
        for piece in text.chunks(size) {
            // Whoever has heard enough may have left.
            let _ = far.write_all(piece).await;
            tokio::task::yield_now().await;
        }
        let _ = far.shutdown().await;
    });
    let got = take(line).await;
    upstream.await.unwrap();
    got
}

#[tokio::test]
async fn an_answer_is_the_same_in_whatever_pieces_it_comes() {
    for (text, status, body, is_whole) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, "hello", true),
        ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", 200, "hello", false),
        ("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", 404, "", true),
        ("HTTP/1.1 204 No\r\n\r\n", 204, "", true),
        ("HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, "until the end", true),
        (
            "HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 103 H\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            200,
            "ok",
            true,
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n1\r\nd\r\n0\r\nx: 1\r\n\r\n",
            200,
            "abcd",
            true,
        ),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", 200, "abc", false),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nx", 200, "abc", false),
    ] {
        for size in 1..=text.len() {
            let got = told(text.as_bytes(), size).await.unwrap();
            let seen = (got.status, String::from_utf8(got.body).unwrap(), got.is_whole);
            assert_eq!(seen, (status, body.to_owned(), is_whole), "{text:?} in pieces of {size}");
        }
    }
}

#[tokio::test]
async fn what_is_no_answer_is_told_as_such() {
    for text in
        ["", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\nX-Half: ", "HTTP/1.1 100 Go\r\n\r\n", "nonsense\r\n\r\n"]
    {
        for size in [1, 7, 100] {
            assert!(told(text.as_bytes(), size).await.is_err(), "{text:?} in pieces of {size}");
        }
    }
}

#[tokio::test]
async fn a_head_may_be_so_long_and_no_longer() {
    let head = |length: usize| {
        let padding = "x".repeat(length - "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: \r\n\r\n".len());
        format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: {padding}\r\n\r\n")
    };
    assert_eq!(told(head(60_000).as_bytes(), 10_000).await.unwrap().status, 200);
    let endless = head(200_000);
    let problem = told(endless.as_bytes(), 10_000).await.unwrap_err();
    assert!(problem.contains("too long"), "{problem}");
}

#[tokio::test]
async fn a_connection_is_kept_only_if_it_is_where_it_should_be() {
    for (text, is_kept) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", true),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more", false),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nmore", false),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", false),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            false,
        ),
        ("HTTP/1.1 200 OK\r\n\r\nok", false),
    ] {
        let got = told(text.as_bytes(), text.len()).await.unwrap();
        assert!(got.body.starts_with(b"ok") && got.is_whole, "{text:?}");
        assert_eq!(got.is_kept, is_kept, "{text:?}");
    }
}

#[tokio::test]
async fn a_connection_that_ended_or_spoke_while_it_waited_is_not_taken() {
    let pool = Pool::new(8);
    assert!(pool.take(Instant::now()).is_none());
    let (line, far) = connected().await;
    pool.keep(line, Instant::now());
    let line = pool.take(Instant::now()).expect("nothing happened to it");
    pool.keep(line, Instant::now());
    drop(far);
    until_none_is_left(&pool).await;
    let (line, mut far) = connected().await;
    pool.keep(line, Instant::now());
    far.write_all(b"HTTP/1.1 408 Too Late\r\n\r\n").await.unwrap();
    until_none_is_left(&pool).await;
}

/// Takes what there is until the system has heard of what became of it.
async fn until_none_is_left(pool: &Pool) {
    while let Some(line) = pool.take(Instant::now()) {
        pool.keep(line, Instant::now());
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_call_that_was_certainly_not_sent_can_be_made_again() {
    let (mut line, far) = connected().await;
    line.is_used = true;
    far.set_zero_linger().unwrap();
    drop(far);
    while line.stream.is_quiet() {
        tokio::task::yield_now().await;
    }
    // The first write learns of the end.
    assert_eq!(take(line).await.unwrap_err(), "unsent");
}

#[tokio::test]
async fn an_upstream_may_answer_before_it_has_heard_all() {
    let (line, mut far) = connected().await;
    let ask = vec![b'x'; 32 << 20];
    let mut talk = Talk::new(line, ask.clone());
    far.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n").await.unwrap();
    let Ok(head) = talk.head(false, |_, _| Poll::Pending).await else { panic!("there is an answer") };
    assert!(talk.written < ask.len());
    let pool = Pool::new(1);
    let stop = CancellationToken::new();
    let around = Around { pool: pool.clone(), caller: None, idle_timeout: PATIENCE, stop };
    let mut flow = Flow::new(talk, head.body, head.is_kept, around);
    assert_eq!(flow.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
    // It goes on to hear the rest, and only then ends.
    let upstream = tokio::spawn(async move {
        let mut heard = vec![0; 32 << 20];
        far.read_exact(&mut heard).await.unwrap();
        far.write_all(b"0\r\n\r\n").await.unwrap();
        (heard, far)
    });
    assert!(flow.frame().await.is_none());
    let (heard, _far) = upstream.await.unwrap();
    assert!(heard == ask);
    assert!(pool.has_kept(), "all was said");
}

#[tokio::test]
async fn a_large_answer_waits_for_whoever_takes_it() {
    const LENGTH: usize = 10 << 20;
    let (mut line, mut far) = connected().await;
    line.alarm.begin(Instant::now(), PATIENCE);
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let upstream = tokio::spawn(async move {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n");
        far.write_all(head.as_bytes()).await.unwrap();
        for n in 0..LENGTH / 1_024 {
            far.write_all(&[u8::try_from(n % 251).unwrap(); 1_024]).await.unwrap();
            count.fetch_add(1_024, Ordering::SeqCst);
        }
        far
    });
    let mut talk = Talk::new(line, ASK.to_vec());
    let Ok(head) = talk.head(false, |_, _| Poll::Pending).await else { panic!("there is an answer") };
    let (pool, stop) = (Pool::new(1), CancellationToken::new());
    let around = Around { pool: pool.clone(), caller: None, idle_timeout: PATIENCE, stop };
    let mut flow = Flow::new(talk, head.body, head.is_kept, around);
    let mut taken = 0;
    while let Some(frame) = flow.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        assert!(data.len() <= ROOM_SIZE);
        let is_right = |(at, byte): (usize, &u8)| usize::from(*byte) == (taken + at) / 1_024 % 251;
        assert!(data.iter().enumerate().all(is_right), "after {taken}");
        taken += data.len();
        // Whoever would read ahead has the time for it now.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert!(sent.load(Ordering::SeqCst) <= taken + BETWEEN_MAX, "after {taken}");
    }
    assert_eq!(taken, LENGTH);
    drop(upstream.await.unwrap());
    assert!(pool.has_kept());
}

#[test]
fn a_head_is_looked_at_again_when_its_end_may_have_come() {
    let head = b"HTTP/1.1 200 OK\r\nX: 1\r\n\r\n";
    for looked in 1..head.len() {
        assert!(may_be_whole(head, looked), "{looked}");
        assert!(!may_be_whole(&head[..head.len() - 1], looked.min(head.len() - 1)), "{looked}");
    }
    assert!(may_be_whole(b"HTTP/1.1 200 OK\n\n", 16));
}

#[tokio::test]
async fn an_upstream_that_only_announces_its_answer_is_not_listened_to_for_ever() {
    let (line, mut far) = connected().await;
    let announcing = async {
        while far.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {}
        std::future::pending::<()>().await;
    };
    tokio::select! {
        taken = take(line) => assert!(taken.unwrap_err().contains("too long")),
        () = announcing => {}
    }
}
