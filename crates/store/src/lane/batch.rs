//! A batch as an engine gets it.

use std::fmt;
use std::sync::Arc;

use super::queue::Queue;

/// Commands to be carried out together: those that wait in their lane when the batch is taken.
pub struct Batch<C>(Source<C>);

enum Source<C> {
    Lane(Arc<dyn Waiting<C>>, u64),
    Made(Vec<C>),
}

/// A lane, whatever its answers are.
pub(super) trait Waiting<C>: Send + Sync {
    /// The commands of the batch with this number.
    fn take(&self, number: u64) -> Vec<C>;
}

impl<C: Send + 'static> Batch<C> {
    pub(super) fn promised<R: Send + 'static>(queue: &Arc<Queue<C, R>>, number: u64) -> Self {
        Self(Source::Lane(Arc::clone(queue) as Arc<dyn Waiting<C>>, number))
    }
}

impl<C> Batch<C> {
    /// Makes the batch. It is empty when all of its callers have gone meanwhile.
    #[must_use]
    pub fn take(self) -> Vec<C> {
        match self.0 {
            Source::Lane(lane, number) => lane.take(number),
            Source::Made(commands) => commands,
        }
    }
}

impl<C> From<Vec<C>> for Batch<C> {
    fn from(commands: Vec<C>) -> Self {
        Self(Source::Made(commands))
    }
}

impl<C> fmt::Debug for Batch<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").finish_non_exhaustive()
    }
}
