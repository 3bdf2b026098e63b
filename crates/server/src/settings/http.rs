//! Limits of connections and requests.

use std::time::Duration;

use super::parse::{bytes, count, duration};
use super::source::{SettingError, SettingsReader};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// `http.timeout`: how long a call may wait for the engines before it is answered with 503.
    pub timeout: Duration,
    /// `http.read_timeout`: how long a caller may take to send the head, and the body, of a request.
    pub read_timeout: Duration,
    /// `http.max_body`: the largest request body, in bytes.
    pub max_body: usize,
    /// `http.max_buffered`: the memory for unfinished requests of all connections, in bytes. Half of it is for bulk uploads.
    pub max_buffered: usize,
    /// `http.max_connections`: connections served at once; further ones are answered 503.
    pub max_connections: usize,
    /// `http.max_streams`: how many connections may be event streams and long polls.
    pub max_streams: usize,
    /// `http.threads`: threads that serve HTTP; 0 means one per core.
    threads: usize,
    /// `http.shutdown_timeout`: how long a stop waits for accepted work to finish.
    pub shutdown_timeout: Duration,
}

impl HttpSettings {
    /// The default of `http.timeout`.
    pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let span = "a duration from 1ms to 24h, such as 500ms or 2s";
        let size = "a size in bytes such as 65536, 64KiB or 1MiB";
        let ten = Duration::from_secs(10);
        let number = "a number from 1 to 1000000";
        let max_connections = reader.get("http.max_connections", 20_000, count(1_000_000), number)?;
        // The other quarter is for requests that are answered at once.
        let most_streams = (max_connections * 3 / 4).max(1);
        let max_body = reader.get("http.max_body", 1 << 20, bytes, size)?;
        let most_buffered = max_body.saturating_mul(4).max(64 << 20);
        Ok(Self {
            timeout: reader.get("http.timeout", Self::TIMEOUT, duration, span)?,
            read_timeout: reader.get("http.read_timeout", ten, duration, span)?,
            max_body,
            max_buffered: reader.get("http.max_buffered", most_buffered, bytes, size)?,
            max_connections,
            max_streams: reader.get("http.max_streams", most_streams, count(1_000_000), number)?,
            threads: reader.get("http.threads", 0, threads, "a number from 0 to 1024")?,
            shutdown_timeout: reader.get("http.shutdown_timeout", Duration::from_secs(15), duration, span)?,
        })
    }

    /// Refuses limits that contradict each other.
    pub(crate) fn check(&self) -> Result<(), SettingError> {
        let least_buffered = self.max_body.saturating_mul(2);
        if self.max_buffered < least_buffered {
            let allowed = format!("at least twice http.max_body, {least_buffered} bytes");
            return Err(SettingError::new("http.max_buffered", self.max_buffered, allowed));
        }
        if self.max_streams > self.max_connections {
            let allowed = format!("at most http.max_connections, {}", self.max_connections);
            return Err(SettingError::new("http.max_streams", self.max_streams, allowed));
        }
        Ok(())
    }

    /// The number of threads that serve HTTP.
    pub(crate) fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if self.threads == 0 { cores() } else { self.threads }
    }
}

fn threads(text: &str) -> Option<usize> {
    text.trim().parse().ok().filter(|threads| *threads <= 1_024)
}
