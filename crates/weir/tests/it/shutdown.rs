//! SIGTERM: accepted requests are finished and answered, then the process exits with 0.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use weir_testkit::http::Error;
use weir_testkit::wait;

use crate::fixtures::{Running, Store, TEST_TIMEOUT, audit, configure, message, on_each_engine};

async fn a_stop_under_load_loses_no_response(store: Store) {
    let mut server = Running::start(store).await;
    configure(&server.client(), "u", 1_000_000, 60).await;
    let (stopping, accepted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let callers: Vec<_> = (0..16)
        .map(|_| {
            let (client, stopping, accepted) = (server.client(), stopping.clone(), accepted.clone());
            tokio::spawn(async move {
                loop {
                    match client.post("/api/send", &message("u", "m")).await {
                        Ok(response) if response.status == 200 => {
                            accepted.fetch_add(1, Ordering::SeqCst);
                        }
                        Ok(response) => assert_eq!(response.status, 503, "{:?}", response.body),
                        // A refused or closed connection is allowed only once the server stops.
                        Err(Error::TimedOut) => panic!("a request got no response"),
                        Err(error) => {
                            assert!(stopping.load(Ordering::SeqCst), "{error}");
                            return;
                        }
                    }
                }
            })
        })
        .collect();
    wait::until("200 messages are accepted", TEST_TIMEOUT, async || accepted.load(Ordering::SeqCst) > 200)
        .await;
    stopping.store(true, Ordering::SeqCst);
    server.weir.terminate();
    let status = server.weir.wait(Duration::from_secs(15)).await;
    assert!(status.success(), "{status}");
    for caller in callers {
        caller.await.expect("the caller ends without a panic");
    }
    server.weir.restart().await;
    let books = audit(&server.operator()).await;
    let counted = books["quota"]["accepted"].as_u64().unwrap();
    assert!(counted >= accepted.load(Ordering::SeqCst) as u64, "every 200 is counted");
    assert_eq!(books["ok"], true, "{books}");
}

on_each_engine!(a_stop_under_load_loses_no_response);

#[tokio::test]
async fn idle_connections_do_not_delay_a_stop() {
    let mut server = Running::start(Store::Embedded).await;
    let _idle = tokio::net::TcpStream::connect(server.weir.addr()).await.unwrap();
    let client = server.client();
    assert_eq!(client.get("/livez").await.unwrap().status, 200);
    server.weir.terminate();
    assert!(server.weir.wait(Duration::from_secs(5)).await.success());
}
