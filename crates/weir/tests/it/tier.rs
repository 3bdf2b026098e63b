//! Tier: plans and what they allow, and limits for anyone.

mod auth;
mod check;
mod crash;
mod fixtures;
mod hold;
mod plans;
mod policy;
mod redis;
