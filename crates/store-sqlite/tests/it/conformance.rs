//! The conformance suites on the embedded engine.

use weir_store_conformance::EngineFixture;
use weir_store_conformance::sale::dead;

use crate::fixtures::Embedded;

weir_store_conformance::suites!(crate::fixtures::Embedded<false>);

mod in_turns {
    weir_store_conformance::suites!(crate::fixtures::Embedded<true>);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_not_be_written_down_is_kept_once_and_can_be_tried_again() {
    let h = Embedded::<false>::open().await;
    dead::what_could_not_be_written_down_is_kept_once_and_can_be_tried_again(&h.engine).await;
}
