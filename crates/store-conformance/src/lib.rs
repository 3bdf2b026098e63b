//! One conformance suite for every engine: it checks that an engine follows the rules in `weir-core` and the contracts of
//! the traits in `weir-store` and `weir-queue`.
//!
//! The only engines here are naive models, which test the suite itself. The tests of an engine define one fixture: a type
//! that implements [`EngineFixture`] and the trait of each capability that the engine has. [`suites!`], or the macro of one
//! capability, then generates a test with its own name for each case:
//!
//! ```ignore
//! struct Sqlite { /* the engine, its directory, its clock */ }
//!
//! impl weir_store_conformance::EngineFixture for Sqlite { /* … */ }
//! impl weir_store_conformance::HasSales for Sqlite { /* … */ }
//!
//! weir_store_conformance::sale_suite!(crate::Sqlite);
//! ```
//!
//! A module of a capability is a group of cases, and each public function in it without arguments is one case; `h` is its
//! fixture. The macro of the capability is the only list of its cases, and `tests/listing.rs` checks that it is complete.

pub mod books;
pub mod claims;
pub mod fixtures;
pub mod model;
pub mod quota;
pub mod request;
pub mod sale;
pub mod slot;
pub mod tier;

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::{ManualClock, Timestamp};
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_store::StoreClock;
use weir_store::book::BookStore;
use weir_store::quota::QuotaStore;
use weir_store::request::RequestStore;
use weir_store::sale::SaleStore;
use weir_store::slot::SlotStore;
use weir_store::tier::{LimitStore, TierStore};

/// The time at which every fixture's clock starts: 2026-01-01T00:00:00Z.
pub const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

/// Timeout for an engine under test when it calls its database or Redis; long, so that a busy machine fails no case.
pub const ENGINE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// An engine under test: how to open and restart it, and the clock it uses.
#[async_trait]
pub trait EngineFixture: Send + Sync + Sized + 'static {
    /// Opens a fresh, empty engine whose clock shows [`START`].
    async fn open() -> Self;

    /// Whether `WEIR_TEST_SKIP` leaves this engine out; its cases then pass without running.
    fn skipped() -> bool {
        false
    }

    /// The clock that the engine reads.
    fn clock(&self) -> &ManualClock;

    /// The same clock as the store's trait object; `None` for the naive models, whose clock is never set back.
    fn store_clock(&self) -> Option<Arc<dyn StoreClock>> {
        None
    }

    /// The same engine as the books of its rows; `None` for an engine without any.
    fn books(&self) -> Option<Arc<dyn BookStore>> {
        None
    }

    /// A clean restart: closes the engine and opens it again on the same data and clock. No case uses a store from before
    /// the restart afterwards.
    async fn reopen(self) -> Self;

    /// A second server on the same data and clock, or `None` if only one process can use the engine; cases of several
    /// servers then have nothing to test. Each server may be reopened or dropped while the other stays.
    async fn second_server(&self) -> Option<Self> {
        None
    }
}

/// An engine with a queue.
pub trait HasQueue: EngineFixture {
    fn queue(&self) -> Arc<dyn Queue>;
}

/// An engine that stores quotas and queues the accepted messages.
#[async_trait]
pub trait HasQuota: HasQueue {
    fn quota(&self) -> Arc<dyn QuotaStore>;

    /// The highest count of a user that the audit accepts: the limit, or a higher count that was kept when the limit was lowered.
    async fn count_max(&self, user: &str) -> u32;

    /// Whether a send is counted and enqueued atomically. If not, parallel sends may be enqueued in another order than
    /// they were counted in.
    fn counts_and_queues_atomically() -> bool {
        true
    }
}

/// An engine that stores requests and queues their webhooks.
pub trait HasRequests: HasQueue {
    fn requests(&self) -> Arc<dyn RequestStore>;
}

/// An engine that stores slots and queues those that are due.
pub trait HasSlots: HasQueue {
    fn slots(&self) -> Arc<dyn SlotStore>;

    /// The same store, which also schedules every assigned slot for dispatch.
    fn dispatching_slots(&self) -> Arc<dyn SlotStore>;

    fn due(&self) -> Arc<dyn DueStore>;
}

/// An engine that enforces the limits of tiers and policies.
pub trait HasLimits: EngineFixture {
    fn limits(&self) -> Arc<dyn LimitStore>;

    /// The store of tiers and policies; `None` for an engine that only enforces limits.
    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        None
    }

    /// Whether servers on the same data share one count; otherwise each counts for itself.
    fn servers_share_counts() -> bool {
        true
    }
}

/// An engine that stores sales.
#[async_trait]
pub trait HasSales: EngineFixture {
    fn sales(&self) -> Arc<dyn SaleStore>;

    /// Waits until every purchase is in the ledger, for engines that write it behind.
    async fn wait_until_persisted(&self) {}
}

/// Generates the suites of all five capabilities, each in its own module. The fixture is a path from `crate`.
#[macro_export]
macro_rules! suites {
    ($fixture:ty) => {
        mod quota {
            $crate::quota_suite!($fixture);
        }
        mod request {
            $crate::request_suite!($fixture);
        }
        mod sale {
            $crate::sale_suite!($fixture);
        }
        mod slot {
            $crate::slot_suite!($fixture);
        }
        mod tier {
            $crate::tier_suite!($fixture);
        }
    };
}

/// Generates the tests for the list of cases of one capability.
///
/// The crate that calls it needs `tokio` with `macros`, `rt-multi-thread` and `time`.
#[doc(hidden)]
#[macro_export]
macro_rules! suite_tests {
    ($fixture:ty, $capability:ident; $($group:ident: [$($case:ident),* $(,)?]),* $(,)?) => {
        type Fixture = $fixture;
        $(
            mod $group {
                $(
                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $case() {
                        if <super::Fixture as $crate::EngineFixture>::skipped() {
                            return;
                        }
                        let case = $crate::$capability::$group::$case::<super::Fixture>();
                        $crate::fixtures::with_timeout(case).await;
                    }
                )*
            }
        )*
    };
}
