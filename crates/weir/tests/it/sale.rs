//! Sale from the outside. Tests of the design's acceptance criteria carry their ids: `fl_1` is FL-1, and so on.

mod crowd;
mod dead;
mod demo;
mod edge;
pub(crate) mod fixtures;
mod nginx;
mod page;
mod products;
mod pubsub;
mod purchases;
mod redis;
mod servers;
mod states;
mod stream;
