//! Tier: subscriptions, tiers, policies, checks and holds.

mod auth;
mod check;
mod concurrency;
mod crash;
mod fixtures;
mod hold;
mod plans;
mod policy;
mod redis;
mod subscriptions;
