//! One conformance suite for every engine: its answers are held to the rule in `weir-core` and to what the seam in
//! `weir-store` and `weir-queue` promises.
//!
//! There is no engine here but the naive ones that prove the suite itself. An engine has one fixture in its tests: a type
//! that implements [`EngineFixture`] and a trait for each capability that it has. [`suites!`], or the macro of one
//! capability, then makes a test of each case, which shows by name in the test output:
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
//! A module of a capability is a group of behaviours, a public function in it one case. The capability's macro is the
//! only list of its cases, and `tests/listing.rs` holds it complete.

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
use weir_store::quota::QuotaStore;
use weir_store::request::RequestStore;
use weir_store::sale::SaleStore;
use weir_store::slot::SlotStore;
use weir_store::tier::{LimitStore, TierStore};

/// What every fixture's clock shows at first: 2026-01-01T00:00:00Z.
pub const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

/// How long an engine in a suite may wait for what it stands on, so that a busy machine fails no case.
pub const ENGINE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// An engine under test: how it is opened, closed and opened again, and by which clock it goes.
#[async_trait]
pub trait EngineFixture: Send + Sync + Sized + 'static {
    /// A fresh, empty engine whose clock stands at [`START`].
    async fn open() -> Self;

    /// Whether somebody asked for this engine to be left out; its cases then pass without running.
    fn skipped() -> bool {
        false
    }

    /// The clock the engine decides by.
    fn clock(&self) -> &ManualClock;

    /// The same clock as the store sees it; `None` for the naive models, whose clock is never set back.
    fn store_clock(&self) -> Option<Arc<dyn StoreClock>> {
        None
    }

    /// A clean restart: closes the engine and opens it again on the same data and the same clock. No case keeps a
    /// store over it.
    async fn reopen(self) -> Self;

    /// Another server on the same data and the same clock; `None` when the engine belongs to one process, and then
    /// cases of several servers have nothing to show. Each may be reopened or dropped while the other stays.
    async fn second_server(&self) -> Option<Self> {
        None
    }
}

/// An engine that is a queue.
pub trait HasQueue: EngineFixture {
    /// The queue.
    fn queue(&self) -> Arc<dyn Queue>;
}

/// An engine that stores quotas, and queues what they let through.
pub trait HasQuota: HasQueue {
    /// The store of quotas.
    fn quota(&self) -> Arc<dyn QuotaStore>;

    /// Whether a send is counted and queued in one step. Where it is not, sends that run at once may be queued in
    /// another order than they were counted in.
    fn counts_and_queues_atomically() -> bool {
        true
    }
}

/// An engine that stores requests, and queues webhooks.
pub trait HasRequests: HasQueue {
    /// The store of requests.
    fn requests(&self) -> Arc<dyn RequestStore>;
}

/// An engine that stores slots, and queues those that are due.
pub trait HasSlots: HasQueue {
    /// The store of slots.
    fn slots(&self) -> Arc<dyn SlotStore>;

    /// The same store with every slot noted, to be dispatched when its time comes.
    fn dispatching_slots(&self) -> Arc<dyn SlotStore>;

    /// Where slots that are due are taken.
    fn due(&self) -> Arc<dyn DueStore>;
}

/// An engine that decides by limits.
pub trait HasLimits: EngineFixture {
    /// What decides.
    fn limits(&self) -> Arc<dyn LimitStore>;

    /// Where tiers and policies are defined; `None` where there is only something that decides.
    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        None
    }

    /// Whether servers on the same data count together, not each for itself.
    fn servers_share_counts() -> bool {
        true
    }
}

/// An engine that stores sales.
#[async_trait]
pub trait HasSales: EngineFixture {
    /// The store of sales.
    fn sales(&self) -> Arc<dyn SaleStore>;

    /// Waits until everything sold is written down, where that comes later.
    async fn wait_until_persisted(&self) {}
}

/// The suites of all five capabilities, each in a module of its own, against the fixture named: a path from `crate`.
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

/// What the macro of a capability turns its list into.
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
