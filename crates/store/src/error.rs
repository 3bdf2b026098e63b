//! How a store operation breaks. Whether trying again can help is the only thing callers may ask.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// Something broke. Clones share the cause, since one failed commit fails a whole batch.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine cannot be reached, or did not answer in time. Whether the work was done is unknown.
    #[error("{engine} is unavailable")]
    Unavailable {
        /// Which engine.
        engine: &'static str,
        /// What it or the network said.
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// More work is waiting than is allowed to wait; nothing was done.
    #[error("the {lane} lane is full")]
    Overloaded {
        /// Which lane.
        lane: &'static str,
    },
    /// As many keys have spent something as the memory of limits may hold, and this one is new; nothing was done.
    #[error("{max} keys have spent something, the most that rate_limit.keys_max allows")]
    KeysExhausted {
        /// How many there may be.
        max: usize,
    },
    /// The server is stopping and takes no new work; nothing was done.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine answered with something that trying again will not mend: a fault in Weir or in the data.
    #[error("{engine} failed")]
    Failed {
        /// Which engine.
        engine: &'static str,
        /// What went wrong.
        #[source]
        source: Arc<dyn StdError + Send + Sync>,
    },
}

impl Error {
    /// An engine that cannot be reached or did not answer in time.
    pub fn unavailable(engine: &'static str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Unavailable { engine, source: Arc::from(source.into()) }
    }

    /// A fault that trying again will not mend.
    pub fn failed(engine: &'static str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Failed { engine, source: Arc::from(source.into()) }
    }

    /// What the engine, the system or the network said.
    #[must_use]
    pub fn cause(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            // Through the pointer: what it points to is what can be asked for its type.
            Self::Unavailable { source, .. } | Self::Failed { source, .. } => Some(&**source),
            Self::Overloaded { .. } | Self::KeysExhausted { .. } | Self::ShuttingDown => None,
        }
    }

    /// The error with all its causes, on one line.
    #[must_use]
    pub const fn with_causes(&self) -> WithCauses<'_> {
        WithCauses(self)
    }

    /// Whether the same call can succeed later without anybody mending anything.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Unavailable { .. }
            | Self::Overloaded { .. }
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
    fn causes_are_told_and_can_be_asked_for_their_type() {
        let error = Error::unavailable("engine", std::io::Error::other("cut off"));
        assert_eq!(error.with_causes().to_string(), "engine is unavailable: cut off");
        assert!(error.cause().is_some_and(|cause| cause.is::<std::io::Error>()));
    }
}
