//! Quota with Redis in front of Postgres: exact on any number of servers and during failures of Redis.

mod failures;
mod fixtures;
mod limits;
mod servers;
