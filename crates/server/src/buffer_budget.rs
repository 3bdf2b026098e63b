//! A budget for the memory of unfinished requests, over the whole process. Without it, callers that send half a request each
//! could take all the memory there is.
//!
//! Large heads and bodies that come in pieces share one budget, bulk uploads another (see `app.rs`): uploads may wait for
//! theirs, and what waits must not take memory from requests that are refused at once. A request that comes in one piece, as
//! nearly all do, takes nothing from either.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub struct BufferBudget {
    /// One permit a byte.
    free: Arc<Semaphore>,
    total: usize,
}

/// The part of the budget that one buffer uses; released on drop.
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
    /// Creates a budget of `bytes`.
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

    /// The size of the budget in bytes.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    /// The bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free.available_permits())
    }
}

impl BufferCharge {
    /// The bytes charged.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes the charge to `bytes`. Shrinking never fails.
    /// Fails when the budget is spent. The charge is then unchanged.
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

    /// Grows the charge by `more` bytes, and waits for them. Waiters are served in order; the first one takes everything that
    /// is released until it has enough, so only budgets whose users all wait, with a timeout, should be waited for.
    /// Fails when `more` is larger than any budget.
    pub async fn grow(&mut self, more: usize) -> Result<(), BudgetSpent> {
        let permits = u32::try_from(more).map_err(|_too_many| BudgetSpent)?;
        // The budget is never closed.
        self.free.acquire_many(permits).await.map_err(|_closed| BudgetSpent)?.forget();
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
    fn a_byte_is_charged_to_one_buffer_only() {
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
    fn a_waiter_gets_what_others_release() {
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
    fn a_split_charge_is_as_large_as_before_and_released_in_parts() {
        let budget = BufferBudget::new(100);
        let mut one = budget.charge();
        one.try_resize(60).unwrap();
        let other = one.split(40);
        assert_eq!((one.bytes(), other.bytes(), budget.used()), (20, 40, 60));
        assert_eq!(one.split(100).bytes(), 20, "no more than there is");
        assert_eq!(budget.used(), 40);
        drop((one, other));
        assert_eq!(budget.used(), 0);
    }
}
