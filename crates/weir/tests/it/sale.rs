//! Sale from the outside. Tests of the design's acceptance criteria carry their ids: `fl_1` is FL-1, and so on.

mod buying;
mod crowd;
mod dead;
mod demo;
mod edge;
pub(crate) mod given;
mod many;
mod news;
mod nginx;
mod page;
mod products;
mod redis;
mod stream;
mod turning;
