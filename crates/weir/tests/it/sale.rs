//! Sale over HTTP.

mod anomalies;
mod buyers;
mod crowd;
mod dead;
mod demo;
mod edge;
pub(crate) mod fixtures;
mod many_streams;
mod nginx;
mod operators;
mod page;
mod products;
mod pubsub;
mod purchases;
mod redis;
mod states;
mod stream;
mod throttles;
