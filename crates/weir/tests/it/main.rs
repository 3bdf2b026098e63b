//! Tests of Weir from the outside: the real binary, real engines, real sockets. There is one file per subject; files that test
//! routes have the names of the files that implement them.
#![expect(clippy::unwrap_used, reason = "an unexpected None or Err must fail the test")]

mod architecture;
mod audit;
mod authorization;
mod backlog;
mod bad_input;
mod bounds;
mod clock;
mod connections;
mod console;
mod contract;
mod crash;
mod dead_letters;
mod deploy;
mod failover;
mod fixtures;
mod gateway;
mod graceful_stop;
mod grpc;
mod hot_keys;
mod https;
mod jwks;
mod kafka;
mod kafka_security;
mod operations;
mod otlp;
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
mod sms_provider;
mod stack;
mod stdout;
mod tier;
mod tls;
mod trace;
