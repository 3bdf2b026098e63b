//! The Lua scripts. redis-rs computes their hashes; `client.rs` loads a script that a server lacks.

use std::sync::LazyLock;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Script {
    QuotaSpend,
    QuotaInstall,
    QuotaRelease,
    QuotaReturned,
    QuotaPeek,
    QuotaForget,
    RequestRead,
    RequestCache,
    RequestInvalidate,
    Tier,
    SaleBuy,
    SaleOpen,
    SalePeek,
    SaleFind,
    SaleDrop,
    SaleRead,
    SaleRemove,
    SaleBuyers,
    SaleEnd,
    SaleExtend,
    SaleLog,
    SaleUnlog,
    SaleAttempt,
}

/// A script that trusts only data written under the present `run`, which `trust.lua` defines.
macro_rules! with_run {
    ($file:literal) => {
        concat!(include_str!("scripts/trust.lua"), include_str!(concat!("scripts/", $file)))
    };
}

static SCRIPTS: LazyLock<[redis::Script; 23]> = LazyLock::new(|| {
    [
        with_run!("quota_spend.lua"),
        with_run!("quota_install.lua"),
        with_run!("quota_release.lua"),
        with_run!("quota_returned.lua"),
        with_run!("quota_peek.lua"),
        with_run!("quota_forget.lua"),
        include_str!("scripts/request_read.lua"),
        include_str!("scripts/request_cache.lua"),
        include_str!("scripts/request_invalidate.lua"),
        include_str!("scripts/tier.lua"),
        concat!(
            include_str!("scripts/trust.lua"),
            include_str!("scripts/throttle.lua"),
            include_str!("scripts/sale_buy.lua")
        ),
        with_run!("sale_open.lua"),
        with_run!("sale_peek.lua"),
        with_run!("sale_find.lua"),
        include_str!("scripts/sale_drop.lua"),
        include_str!("scripts/sale_read.lua"),
        include_str!("scripts/sale_remove.lua"),
        with_run!("sale_buyers.lua"),
        with_run!("sale_end.lua"),
        with_run!("sale_extend.lua"),
        with_run!("sale_log.lua"),
        include_str!("scripts/sale_unlog.lua"),
        concat!(include_str!("scripts/throttle.lua"), include_str!("scripts/sale_attempt.lua")),
    ]
    .map(redis::Script::new)
});

impl Script {
    pub(crate) fn script(self) -> &'static redis::Script {
        &SCRIPTS[self as usize]
    }

    /// The name of its file, for metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::QuotaSpend => "quota_spend",
            Self::QuotaInstall => "quota_install",
            Self::QuotaRelease => "quota_release",
            Self::QuotaReturned => "quota_returned",
            Self::QuotaPeek => "quota_peek",
            Self::QuotaForget => "quota_forget",
            Self::RequestRead => "request_read",
            Self::RequestCache => "request_cache",
            Self::RequestInvalidate => "request_invalidate",
            Self::Tier => "tier",
            Self::SaleBuy => "sale_buy",
            Self::SaleOpen => "sale_open",
            Self::SalePeek => "sale_peek",
            Self::SaleFind => "sale_find",
            Self::SaleDrop => "sale_drop",
            Self::SaleRead => "sale_read",
            Self::SaleRemove => "sale_remove",
            Self::SaleBuyers => "sale_buyers",
            Self::SaleEnd => "sale_end",
            Self::SaleExtend => "sale_extend",
            Self::SaleLog => "sale_log",
            Self::SaleUnlog => "sale_unlog",
            Self::SaleAttempt => "sale_attempt",
        }
    }
}
