//! Quota with Redis in front of Postgres: exact on any number of servers, and whatever becomes of Redis.

mod given;
mod limits;
mod servers;
mod trouble;
