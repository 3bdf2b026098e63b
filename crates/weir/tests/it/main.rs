//! Weir from the outside: the real binary, real engines, real sockets. One file a subject; those of routes carry the
//! name of the file that serves them.
#![expect(clippy::unwrap_used, reason = "a test that finds nothing where something must be fails")]

mod architecture;
mod authorization;
mod bad_input;
mod bounds;
mod clock;
mod connections;
mod contract;
mod crash;
mod dead_letters;
mod deploy;
mod fixtures;
mod gateway;
mod graceful_stop;
mod grpc;
mod hot_keys;
mod kafka;
mod operations;
mod outage;
mod overload;
mod queue;
mod quota;
mod readiness;
mod redis;
mod request;
mod sale;
mod security;
mod sender;
mod settings;
mod shutdown;
mod slot;
mod stdout;
mod tier;
mod tls;
