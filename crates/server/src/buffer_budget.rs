//! A budget for the memory of unfinished requests of the whole process. Without it, callers that each send half a request
//! could use up all memory.
//!
//! Large heads and bodies that arrive in pieces share one budget, bulk uploads another (see `app.rs`): uploads wait for
//! memory, and must not take it from requests that are refused at once. A request that arrives in one piece, as nearly all
//! do, is charged to neither.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// A number of bytes to be shared. Clones are the same budget.
#[derive(Clone, Debug)]
pub struct BufferBudget {
    /// One permit per byte.
    free: Arc<Semaphore>,
    total: usize,
}

/// The part of the budget that one buffer uses; released on drop.
#[derive(Debug)]
pub struct BufferCharge {
    free: Arc<Semaphore>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unfinished requests hold as much memory as http.max_buffered allows")]
pub struct BudgetExhausted;

impl BufferBudget {
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let total = bytes.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total }
    }

    /// Returns the charge of an empty buffer.
    #[must_use]
    pub fn charge(&self) -> BufferCharge {
        BufferCharge { free: Arc::clone(&self.free), bytes: 0 }
    }

    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    #[must_use]
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free.available_permits())
    }
}

impl BufferCharge {
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes the charge to `bytes`. Shrinking never fails.
    /// Fails when the budget is exhausted. The charge is then unchanged.
    pub fn try_resize(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        if let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) {
            let more = u32::try_from(more).map_err(|_too_many| BudgetExhausted)?;
            self.free.try_acquire_many(more).map_err(|_none_left| BudgetExhausted)?.forget();
        } else {
            self.free.add_permits(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Grows the charge by `more` bytes and waits until they are free. Waiters are served in order, and the first one takes
    /// everything that is released until it has enough. Only wait for a budget whose users all wait, with a timeout.
    /// Fails when `more` is larger than any budget.
    pub async fn grow(&mut self, more: usize) -> Result<(), BudgetExhausted> {
        let permits = u32::try_from(more).map_err(|_too_many| BudgetExhausted)?;
        // The budget is never closed.
        self.free.acquire_many(permits).await.map_err(|_closed| BudgetExhausted)?.forget();
        self.bytes += more;
        Ok(())
    }

    /// Moves up to `bytes` of this charge into a new one.
    #[must_use]
    pub fn split(&mut self, bytes: usize) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { free: Arc::clone(&self.free), bytes }
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
    fn a_byte_is_charged_to_only_one_buffer() {
        let budget = BufferBudget::new(100);
        let (mut one, mut other) = (budget.charge(), budget.charge());
        assert_eq!(one.try_resize(80), Ok(()));
        assert_eq!(other.try_resize(21), Err(BudgetExhausted));
        assert_eq!((other.bytes(), budget.used()), (0, 80), "a refusal takes nothing");
        assert_eq!(one.try_resize(10), Ok(()));
        assert_eq!(other.try_resize(90), Ok(()));
        drop(other);
        assert_eq!(budget.used(), 10);
        drop(one);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_waiter_gets_the_bytes_that_others_release() {
        let budget = BufferBudget::new(100);
        let (mut one, mut other) = (budget.charge(), budget.charge());
        one.try_resize(60).unwrap();
        let mut waiting = Box::pin(other.grow(50));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(one);
        assert_eq!(waiting.now_or_never(), Some(Ok(())));
        assert_eq!(budget.used(), 50);
    }

    #[test]
    fn both_parts_of_a_split_charge_are_released() {
        let budget = BufferBudget::new(100);
        let mut one = budget.charge();
        one.try_resize(60).unwrap();
        let other = one.split(40);
        assert_eq!((one.bytes(), other.bytes(), budget.used()), (20, 40, 60));
        assert_eq!(one.split(100).bytes(), 20, "no more than was charged");
        assert_eq!(budget.used(), 40);
        drop((one, other));
        assert_eq!(budget.used(), 0);
    }
}
