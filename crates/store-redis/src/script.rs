//! The scripts, loaded into a server when it is connected to.

use redis::aio::MultiplexedConnection;

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

const TEXTS: [&str; 17] = [
    include_str!("scripts/quota_spend.lua"),
    include_str!("scripts/quota_install.lua"),
    include_str!("scripts/quota_release.lua"),
    include_str!("scripts/quota_peek.lua"),
    include_str!("scripts/quota_forget.lua"),
    include_str!("scripts/request_read.lua"),
    include_str!("scripts/request_keep.lua"),
    include_str!("scripts/request_changed.lua"),
    include_str!("scripts/tier.lua"),
    include_str!("scripts/sale_buy.lua"),
    include_str!("scripts/sale_open.lua"),
    include_str!("scripts/sale_peek.lua"),
    include_str!("scripts/sale_find.lua"),
    include_str!("scripts/sale_drop.lua"),
    include_str!("scripts/sale_take.lua"),
    include_str!("scripts/sale_done.lua"),
    include_str!("scripts/sale_buyers.lua"),
];

/// The names under which a server knows the scripts.
#[derive(Clone, Debug)]
pub(crate) struct Names([String; TEXTS.len()]);

impl Names {
    pub(crate) async fn load(connection: &mut MultiplexedConnection) -> redis::RedisResult<Self> {
        let mut load = redis::pipe();
        for text in TEXTS {
            load.cmd("SCRIPT").arg("LOAD").arg(text);
        }
        load.query_async(connection).await.map(Self)
    }

    pub(crate) const fn of(&self, script: Script) -> &str {
        self.0[script as usize].as_str()
    }
}
