//! Errors of store operations. Callers may ask only whether a retry can help.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// Why a store operation broke. Clones share the cause, since one failed commit fails a whole batch.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine cannot be reached, or did not answer in time. Whether the work was done is unknown.
    #[error("{engine} is unavailable")]
    Unavailable {
        engine: &'static str,
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// The engine cannot be reached, did not answer in time, or others held what the call needs; nothing was done.
    #[error("{engine} is unavailable")]
    NotDone {
        engine: &'static str,
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// More work is waiting than is allowed to wait; nothing was done.
    #[error("the {lane} lane is full")]
    Overloaded { lane: &'static str },
    /// The memory of rate limits is full, and the call needs an entry for a new key; nothing was done.
    #[error("the memory of rate limits is full: {max} keys, the maximum set by rate_limit.keys_max")]
    KeysExhausted { max: usize },
    /// The server is stopping and takes no new work; nothing was done.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine reported an error that a retry will not fix: a fault in Weir or in the data.
    #[error("{engine} failed")]
    Failed {
        engine: &'static str,
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
}

impl Error {
    pub fn unavailable(engine: &'static str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Unavailable { engine, source: Arc::from(source.into()) }
    }

    pub fn failed(engine: &'static str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Failed { engine, source: Arc::from(source.into()) }
    }

    /// The same error of a call that failed before it committed anything.
    #[must_use]
    pub fn before_commit(self) -> Self {
        match self {
            Self::Unavailable { engine, source } => Self::NotDone { engine, source },
            error => error,
        }
    }

    /// The underlying error of the engine, the system or the network.
    #[must_use]
    pub fn cause(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            // Dereferenced, so that callers can downcast to the concrete error and not to the `Arc`.
            Self::Unavailable { source, .. } | Self::NotDone { source, .. } | Self::Failed { source, .. } => {
                Some(&**source)
            }
            Self::Overloaded { .. } | Self::KeysExhausted { .. } | Self::ShuttingDown => None,
        }
    }

    /// The error with all its causes, on one line.
    #[must_use]
    pub const fn with_causes(&self) -> WithCauses<'_> {
        WithCauses(self)
    }

    /// Whether the same call can succeed later without anybody fixing anything.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Unavailable { .. }
            | Self::Overloaded { .. }
            | Self::NotDone { .. }
            | Self::KeysExhausted { .. }
            | Self::ShuttingDown => true,
            Self::Failed { .. } => false,
        }
    }
}

/// An [`Error`] with all its causes, on one line.
#[derive(Clone, Copy, Debug)]
pub struct WithCauses<'a>(&'a Error);

impl fmt::Display for WithCauses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.cause();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_printed_and_can_be_downcast() {
        let error = Error::unavailable("engine", std::io::Error::other("cut off"));
        assert_eq!(error.with_causes().to_string(), "engine is unavailable: cut off");
        assert!(error.cause().is_some_and(|cause| cause.is::<std::io::Error>()));
    }
}
