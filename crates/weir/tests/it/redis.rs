//! Quota with Redis in front of Postgres: exact on any number of servers, and whatever becomes of Redis.

mod failures;
mod fixtures;
mod limits;
mod servers;
