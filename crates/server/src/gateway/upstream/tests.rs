use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::*;

/// More than two small sockets buffer, and than hyper writes while nobody reads.
const LONG: usize = 1 << 20;

/// Both ends of a connection with small buffers.
async fn connected() -> (OutboundStream, TcpStream) {
    let small = || {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_send_buffer_size(4_096).unwrap();
        socket.set_recv_buffer_size(4_096).unwrap();
        socket
    };
    let listening = small();
    listening.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listening.listen(1).unwrap();
    let ours = small().connect(listener.local_addr().unwrap()).await.unwrap();
    (OutboundStream::Plain(ours), listener.accept().await.unwrap().0)
}

fn post(length: usize) -> Request<RequestBody> {
    let (upload, _progress) =
        RequestBody::new(Body::from(vec![b'x'; length]), length, Duration::from_secs(60));
    let request = Request::post("/").header("host", "a").header("content-length", length);
    request.body(upload).unwrap()
}

/// Reads a request head and returns the number of bytes read.
async fn read_head(theirs: &mut TcpStream) -> usize {
    let mut bytes = Vec::new();
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        theirs.read_buf(&mut bytes).await.unwrap();
    }
    bytes.len()
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[tokio::test]
async fn a_connection_with_an_unfinished_request_carries_no_other_call() {
    let (stream, mut theirs) = connected().await;
    let mut connection = UpstreamConnection::new(stream).await.unwrap();
    let (answer, ()) = tokio::join!(connection.send(post(LONG)), async {
        read_head(&mut theirs).await;
        theirs.write_all(OK).await.unwrap();
    });
    let body = answer.ok().unwrap().into_body().collect();
    let mut body = pin!(body);
    let text = poll_fn(|context| {
        connection.drive(context);
        body.as_mut().poll(context)
    });
    assert_eq!(text.await.unwrap().to_bytes(), "ok");
    assert!(!connection.is_finished(), "the upstream still waits for the rest");
}

#[tokio::test]
async fn a_connection_with_a_finished_request_carries_another_call() {
    let (stream, mut theirs) = connected().await;
    let mut connection = UpstreamConnection::new(stream).await.unwrap();
    let (answer, ()) = tokio::join!(connection.send(post(LONG)), async {
        let mut received = 0;
        let mut room = vec![0; 1 << 16];
        while received < LONG {
            received += theirs.read(&mut room).await.unwrap();
        }
        theirs.write_all(OK).await.unwrap();
    });
    let mut body = pin!(answer.ok().unwrap().into_body().collect());
    let text = poll_fn(|context| {
        connection.drive(context);
        body.as_mut().poll(context)
    });
    assert_eq!(text.await.unwrap().to_bytes(), "ok");
    assert!(connection.is_finished());
}

#[tokio::test]
async fn an_upstream_that_sends_only_1xx_responses_is_cut_off() {
    let (stream, mut theirs) = connected().await;
    let mut connection = UpstreamConnection::new(stream).await.unwrap();
    let sending_hints = async {
        read_head(&mut theirs).await;
        while theirs.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {}
    };
    tokio::select! {
        answer = connection.send(post(1)) => assert!(answer.is_err()),
        () = sending_hints => panic!("the connection is still open"),
    }
}

#[tokio::test]
async fn a_large_response_is_not_read_ahead_of_the_caller() {
    const PIECE: usize = 1 << 10;
    const LENGTH: usize = 10 << 20;
    // What two small sockets and hyper buffer, and much less than the response.
    const AHEAD_MAX: usize = 512 << 10;
    let (stream, mut theirs) = connected().await;
    let mut connection = UpstreamConnection::new(stream).await.unwrap();
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let upstream = tokio::spawn(async move {
        read_head(&mut theirs).await;
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n");
        theirs.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..LENGTH / PIECE {
            theirs.write_all(&[b'x'; PIECE]).await.unwrap();
            count.fetch_add(PIECE, Ordering::SeqCst);
        }
        theirs
    });
    let answer = connection.send(post(1)).await.ok().unwrap();
    let (_body, progress) = RequestBody::new(Body::empty(), 0, Duration::from_secs(60));
    let pool = Pool::new(1, 1);
    let (body, connection) = (answer.into_body(), Box::new(connection));
    let mut body = ResponseBody::new(body, connection, pool.clone(), None, progress, Duration::from_secs(60));
    let mut taken = 0;
    while let Some(frame) = body.frame().await {
        taken += frame.unwrap().into_data().unwrap().len();
        // Gives a task that reads ahead the time to do so.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert!(sent.load(Ordering::SeqCst) <= taken + AHEAD_MAX, "after {taken}");
    }
    assert_eq!(taken, LENGTH);
    let _theirs = upstream.await.unwrap();
    drop(body);
    assert!(pool.take().is_some(), "the connection carries another call");
}
