//! Many concurrent calls over few connections: every caller gets its own response.

use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use weir_testkit::raw_connection::Listener;

use super::fixtures::TestGateway;

const CALLERS: usize = 24;
const CALLS: usize = 40;

/// Echoes the body of every call, with a framing that the body selects.
async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut read = Vec::new();
    loop {
        let head = loop {
            if let Some(at) = read.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
        };
        let text = String::from_utf8_lossy(&read[..head]).to_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
        let end = head + length.map_or(0, |length| length.parse::<usize>().unwrap());
        while read.len() < end {
            if stream.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
        }
        let body = String::from_utf8_lossy(&read[head..end]).into_owned();
        read.drain(..end);
        let kind: usize = body.rsplit('-').next().unwrap().parse().unwrap();
        if !answer(&mut stream, &body, kind % 6).await? {
            return Ok(());
        }
    }
}

/// Answers a call. Returns whether the connection stays open.
async fn answer(stream: &mut TcpStream, body: &str, kind: usize) -> std::io::Result<bool> {
    let (length, (first, last)) = (body.len(), body.split_at(body.len() / 2));
    let chunk = |part: &str| format!("{:x}\r\n{part}\r\n", part.len());
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let parts = match kind {
        0 => vec![format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}")],
        1 => vec![format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{first}"), last.to_owned()],
        2 => vec![format!("{chunked}{}{}0\r\n\r\n", chunk(first), chunk(last))],
        3 => vec![chunked.to_owned(), chunk(first), chunk(last), "0\r\n\r\n".to_owned()],
        // The second response must reach no caller.
        4 => vec![format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
        )],
        _ => vec![format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{first}"), last.to_owned()],
    };
    for part in parts {
        stream.write_all(part.as_bytes()).await?;
        tokio::task::yield_now().await;
    }
    if kind >= 4 {
        stream.shutdown().await?;
    }
    Ok(kind < 4)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_caller_gets_its_own_response() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let gateway = TestGateway::start_at(Listener::start().await, &url, &[("WEIR_HTTP_THREADS", "2")]).await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(echo(stream));
        }
    });
    let calls = (0..CALLERS).map(|caller| {
        let client = gateway.client();
        tokio::spawn(async move {
            for call in 0..CALLS {
                let body = format!("{}-{caller}-{}", "x".repeat(call * 97), call * 7 + caller);
                let answered =
                    client.request(Method::POST, "/api/v1/ai/x", &[], body.clone()).await.expect("an answer");
                assert_eq!((answered.status, String::from_utf8_lossy(&answered.body)), (200, body.into()));
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
}
