//! The conformance suites on the embedded engine.

use weir_store_conformance::EngineFixture;
use weir_store_conformance::sale::dead;

use crate::fixtures::Embedded;

weir_store_conformance::suites!(crate::fixtures::Embedded<false>);

mod in_turns {
    weir_store_conformance::suites!(crate::fixtures::Embedded<true>);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_that_could_not_be_persisted_become_dead_letters_once_and_can_be_replayed() {
    let h = Embedded::<false>::open().await;
    dead::purchases_that_could_not_be_persisted_become_dead_letters_once_and_can_be_replayed(&h.engine).await;
}
