//! Runs the conformance suites on Redis in front of Postgres, and tier's also on a cluster, where the keys of a decision may
//! be on different servers.

mod quota {
    weir_store_conformance::quota_suite!(crate::fixtures::RedisFixture<false>);
}

mod request {
    weir_store_conformance::request_suite!(crate::fixtures::RedisFixture<false>);
}

mod sale {
    weir_store_conformance::sale_suite!(crate::fixtures::RedisFixture<false>);
}

mod tier {
    weir_store_conformance::tier_suite!(crate::fixtures::RedisFixture<false>);
}

mod tier_cluster {
    weir_store_conformance::tier_suite!(crate::fixtures::RedisFixture<true>);
}
