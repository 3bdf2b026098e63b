//! Standard output that is not read, or cannot be written: the server continues, stops on SIGTERM, and loses no message.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weir_testkit::http::Client;
use weir_testkit::{ports, wait};

use crate::fixtures::{TEST_TIMEOUT, audit, configure, message};

/// A server whose standard output the test controls.
struct BlockedServer {
    child: Child,
    client: Client,
    data: tempfile::TempDir,
}

impl Drop for BlockedServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl BlockedServer {
    async fn start(stdout: Stdio) -> Self {
        let (data, port) = (tempfile::tempdir().unwrap(), ports::unused());
        let child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--data"])
            .arg(data.path())
            .current_dir(data.path())
            .env("WEIR_GRPC_LISTEN", "127.0.0.1:0")
            .env("WEIR_HTTP_SHUTDOWN_TIMEOUT", "500ms")
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let client = Client::new(format!("http://127.0.0.1:{port}"));
        wait::until("the server answers", TEST_TIMEOUT, async || client.get("/livez").await.is_ok()).await;
        Self { child, client, data }
    }

    fn operator(&self) -> Client {
        let key = std::fs::read_to_string(self.data.path().join("admin.key")).unwrap();
        self.client.clone().with_header("x-admin-key", key.trim())
    }

    async fn send(&self, text: &str) -> u16 {
        self.client.post("/api/send", &message("u", text)).await.unwrap().status
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unread_output_delays_neither_calls_nor_a_stop() {
    let mut server = BlockedServer::start(Stdio::piped()).await;
    configure(&server.client, "u", 1_000_000, 60).await;
    // More than a pipe holds: the sender is blocked from here on.
    for _ in 0..4 {
        assert_eq!(server.send(&"x".repeat(100_000)).await, 200);
    }
    for _ in 0..20 {
        assert_eq!(server.send("more").await, 200);
        assert_eq!(server.client.get("/livez").await.unwrap().status, 200);
        assert_eq!(server.client.get("/nowhere").await.unwrap().status, 404);
    }
    assert_eq!(audit(&server.operator()).await["ok"], true);
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    wait::until("the server stops", Duration::from_secs(20), async || {
        server.child.try_wait().unwrap().is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_whose_lines_cannot_be_written_stay_in_the_queue() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let server = BlockedServer::start(Stdio::from(full)).await;
    configure(&server.client, "u", 100, 60).await;
    for _ in 0..3 {
        assert_eq!(server.send("m").await, 200);
    }
    let books = audit(&server.operator()).await;
    assert_eq!((&books["ok"], &books["quota"]["inFlight"]), (&true.into(), &3.into()), "{books}");
    let data = server.data.path().to_owned();
    // With a working output, the same data directory delivers everything.
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    wait::until("the lock of the data directory is free", TEST_TIMEOUT, async || {
        std::fs::File::open(data.join("weir.lock")).unwrap().try_lock().is_ok()
    })
    .await;
    let next = crate::fixtures::weir().data_dir(&data).spawn().await;
    let books = crate::fixtures::wait_until_delivered(&crate::fixtures::operator(&next)).await;
    assert_eq!(books["quota"]["done"], 3);
    assert_eq!(crate::fixtures::deliveries(&next).len(), 3);
}
