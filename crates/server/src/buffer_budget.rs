//! One budget for the memory of requests that have begun to come and cannot be answered yet, over the whole process: large
//! heads, bodies that are read in pieces, batches of uploads. Without it, callers that send half a request each could take
//! all the memory there is.
//!
//! A request that comes in one piece, as nearly all do, never asks for any of it.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub struct BufferBudget {
    /// One permit a byte.
    free: Arc<Semaphore>,
    total: usize,
}

/// The bytes that one buffer has of the budget; given back when it is dropped.
#[derive(Debug)]
pub struct BufferCharge {
    free: Arc<Semaphore>,
    bytes: usize,
}

/// The budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unfinished requests hold as much memory as http.max_buffered allows")]
pub struct BudgetSpent;

impl BufferBudget {
    /// A budget of so many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let total = bytes.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total }
    }

    /// The charge of a buffer that is empty.
    #[must_use]
    pub fn charge(&self) -> BufferCharge {
        BufferCharge { free: Arc::clone(&self.free), bytes: 0 }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    /// The bytes that buffers have of it now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free.available_permits())
    }
}

impl BufferCharge {
    /// The bytes it stands for.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes it stand for so many bytes, if there are that many.
    ///
    /// # Errors
    /// When the budget is spent. The charge is then what it was.
    pub fn try_resize(&mut self, bytes: usize) -> Result<(), BudgetSpent> {
        if let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) {
            let more = u32::try_from(more).map_err(|_too_many| BudgetSpent)?;
            self.free.try_acquire_many(more).map_err(|_none_left| BudgetSpent)?.forget();
        } else {
            self.free.add_permits(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Waits until there are that many bytes more.
    ///
    /// # Errors
    /// When there never will be.
    pub async fn grow(&mut self, more: usize) -> Result<(), BudgetSpent> {
        let permits = u32::try_from(more).map_err(|_too_many| BudgetSpent)?;
        // The budget is never closed.
        self.free.acquire_many(permits).await.map_err(|_closed| BudgetSpent)?.forget();
        self.bytes += more;
        Ok(())
    }
}

impl Drop for BufferCharge {
    fn drop(&mut self) {
        self.free.add_permits(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn what_one_buffer_has_another_cannot_have() {
        let budget = BufferBudget::new(100);
        let (mut one, mut other) = (budget.charge(), budget.charge());
        assert_eq!(one.try_resize(80), Ok(()));
        assert_eq!(other.try_resize(21), Err(BudgetSpent));
        assert_eq!((other.bytes(), budget.used()), (0, 80), "a refusal takes nothing");
        assert_eq!(one.try_resize(10), Ok(()));
        assert_eq!(other.try_resize(90), Ok(()));
        drop(other);
        assert_eq!(budget.used(), 10);
        drop(one);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn whoever_can_wait_gets_what_others_give_back() {
        let budget = BufferBudget::new(100);
        let (mut one, mut other) = (budget.charge(), budget.charge());
        one.try_resize(60).unwrap();
        let mut waiting = Box::pin(other.grow(50));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(one);
        assert_eq!(waiting.now_or_never(), Some(Ok(())));
        assert_eq!(budget.used(), 50);
    }
}
