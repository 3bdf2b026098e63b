//! `weir sale demo`.

use crate::fixtures::{Running, Store, audit};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demo_sells_every_unit_once_and_says_so() {
    let running = Running::start(Store::Embedded).await;
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(["sale", "demo", "--url", &running.weir.base_url(), "--data"]).arg(running.weir.data_dir());
    // The product must be created before its sale starts, even on a slow machine.
    command.args(["--units", "5", "--buyers", "40", "--starts-in", "5", "--lasts", "600"]);
    let output = command.output().await.unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains("/sale/?sku=DEMO-"), "{printed}");
    assert!(printed.contains("5 of 5 units sold to 5 buyers"), "{printed}");
    assert!(printed.contains("35  sold out"), "{printed}");
    let books = audit(&running.operator()).await;
    assert_eq!((&books["sale"]["items"][0]["sold"], &books["ok"]), (&5.into(), &true.into()), "{books}");
}
