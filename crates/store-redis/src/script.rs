//! The scripts. redis-rs knows their hashes and loads those that a server does not have.

use std::sync::LazyLock;

/// The scripts of quota, request, tier and sale.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Script {
    Spend,
    Install,
    Release,
    Peek,
    Forget,
    RequestRead,
    RequestKeep,
    RequestChanged,
    Tier,
    SaleBuy,
    SaleOpen,
    SalePeek,
    SaleFind,
    SaleDrop,
    SaleTake,
    SaleDone,
    SaleBuyers,
}

/// A script that trusts only what was written under the same `run`, which `trust.lua` reads.
macro_rules! trusting {
    ($file:literal) => {
        concat!(include_str!("scripts/trust.lua"), include_str!(concat!("scripts/", $file)))
    };
}

static SCRIPTS: LazyLock<[redis::Script; 17]> = LazyLock::new(|| {
    [
        trusting!("quota_spend.lua"),
        trusting!("quota_install.lua"),
        trusting!("quota_release.lua"),
        trusting!("quota_peek.lua"),
        trusting!("quota_forget.lua"),
        include_str!("scripts/request_read.lua"),
        include_str!("scripts/request_keep.lua"),
        include_str!("scripts/request_changed.lua"),
        include_str!("scripts/tier.lua"),
        trusting!("sale_buy.lua"),
        trusting!("sale_open.lua"),
        trusting!("sale_peek.lua"),
        trusting!("sale_find.lua"),
        include_str!("scripts/sale_drop.lua"),
        include_str!("scripts/sale_take.lua"),
        include_str!("scripts/sale_done.lua"),
        trusting!("sale_buyers.lua"),
    ]
    .map(redis::Script::new)
});

impl Script {
    pub(crate) fn text(self) -> &'static redis::Script {
        &SCRIPTS[self as usize]
    }
}
