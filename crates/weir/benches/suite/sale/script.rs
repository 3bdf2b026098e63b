//! Compares sale with Redis in front of Postgres with `redis-benchmark` calling Weir's own script, for one buyer per
//! call.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};

use super::{BUYERS, FLASH_SALE_UNITS, Load, SKU};
use crate::Bench;
use crate::postgres::Postgres;
use crate::redis::{BUY, OPEN, RANDOM_DIGITS, Redis};
use crate::results::{Bound, Results, Row};
use crate::weir::Engines;

const OPEN_FOR: Duration = Duration::from_secs(3_600);

/// The target for purchases per second with Redis, and for the backlog of the store when the load ends.
const PURCHASES_TARGET_PER_S: f64 = 36_000.0;
const BEHIND_TARGET_S: f64 = 0.1;

/// Measures attempts over HTTP between two runs of the bare script, then purchases, all on one Redis.
pub(crate) async fn compare(
    bench: &Bench,
    postgres: &Postgres,
    results: &mut Results,
    at_least: f64,
) -> Result<()> {
    let redis = Redis::start().await?;
    results.note([redis.conditions().await]);
    let before = measure(bench, &redis).await?;
    results.rows.push(before.clone());
    redis.clear().await;
    let database = postgres.database().await;
    let engines = Engines { postgres: Some(database.url()), redis: Some(redis.url()), ..Engines::EMBEDDED };
    let run = super::measure(bench, engines, Some(&redis), Load::Attempts).await?;
    postgres.drop_database(database).await?;
    let after = measure(bench, &redis).await?;
    results.compare(run, [&before, &after], at_least);
    results.rows.push(after);
    redis.clear().await;
    let database = postgres.database().await;
    let engines = Engines { postgres: Some(database.url()), redis: Some(redis.url()), ..Engines::EMBEDDED };
    let run = super::measure(bench, engines, Some(&redis), Load::Units).await?;
    postgres.drop_database(database).await?;
    results.rate_target(&run.row, PURCHASES_TARGET_PER_S);
    if let Some(sender) = run.row.sender {
        let name = format!("{}, store behind", run.row.name);
        results.target(&name, sender.lag_s, Bound::Below(BEHIND_TARGET_S), "s");
    }
    results.add(run);
    Ok(())
}

/// Measures the calls per second of the bare script for a sale of a hundred units: nearly all find it sold out.
async fn measure(bench: &Bench, redis: &Redis) -> Result<Row> {
    let name = "redis-benchmark, attempts to buy".to_owned();
    eprintln!("measuring: {name}");
    redis.clear().await;
    let (server, key) = (redis.server(), format!("sale:{{{SKU}}}"));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is set")?;
    let (start, end) = (now.as_micros().to_string(), (now + OPEN_FOR).as_micros().to_string());
    let units = FLASH_SALE_UNITS.to_string();
    let sale = ["1", SKU, "Bench", &units, &start, &end, &start, "UPCOMING", "", "1", "0"];
    server.command(&[&["EVAL", OPEN, "1", &key][..], &sale].concat()).await;
    let sha = server.command(&["SCRIPT", "LOAD", BUY]).await.text();
    let buyer = format!("buyer-{RANDOM_DIGITS}");
    let words = ["EVALSHA", &sha, "1", &key, "", "1", &buyer].map(str::to_owned);
    let (row, _calls) = redis.run(bench, BUYERS, &words).await?;
    let sold = server.command(&["HLEN", &format!("{key}:buyers")]).await.integer();
    ensure!(sold == i64::from(FLASH_SALE_UNITS), "{sold} of {FLASH_SALE_UNITS} units were sold");
    Ok(Row { name, ..row })
}
