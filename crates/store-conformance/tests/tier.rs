//! The cases of tier against the naive model: proves that they can be passed.

use std::sync::Arc;

use weir_core::ManualClock;
use weir_store::tier::{LimitStore, TierStore};
use weir_store_conformance::START;
use weir_store_conformance::tier::TierHarness;
use weir_store_conformance::tier::model::NaiveLimits;

struct Naive {
    clock: ManualClock,
    limits: Arc<NaiveLimits>,
}

#[async_trait::async_trait]
impl TierHarness for Naive {
    async fn open() -> Self {
        let clock = ManualClock::at(START);
        Self { limits: Arc::new(NaiveLimits::new(clock.clone())), clock }
    }

    fn may_be_set_back() -> bool {
        false
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::<NaiveLimits>::clone(&self.limits)
    }

    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        None
    }

    async fn reopen(self) -> Self {
        self
    }

    async fn another(&self) -> Option<Self> {
        Some(Self { clock: self.clock.clone(), limits: Arc::clone(&self.limits) })
    }
}

weir_store_conformance::tier_suite!(Naive);
