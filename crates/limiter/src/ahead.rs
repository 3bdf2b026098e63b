//! Has memory on its way before it is needed.
//!
//! With millions of keys a decision waits for main memory and for little else. Where a key stands follows from its hash
//! and from where its shard's row lies, so all that is going to be read of the row can be asked for at once, before the
//! lock is taken and the clock is read. And where a row is large, the processor has to look up where each of its pages is,
//! which costs as much again unless they are huge ones.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Where a shard's row lies, for whoever does not hold its lock. It may have moved since, so this is good for nothing but
/// asking for memory. Rows seldom move, so all threads have it in their caches, unlike the line of the lock.
#[derive(Debug)]
#[repr(align(16))]
pub(crate) struct Hint {
    row: AtomicPtr<u8>,
    places: AtomicU32,
}

/// How many places are asked for. In a row as full as ours may be, nine of ten keys stand in these.
const PLACES: usize = 4;

impl Hint {
    pub(crate) const fn new() -> Self {
        Self { row: AtomicPtr::new(ptr::null_mut()), places: AtomicU32::new(0) }
    }

    /// Notes where the row lies now. Answers with that if it has moved.
    pub(crate) fn note<T>(&self, row: &[T], places: u32) -> Option<Moved> {
        let at = row.as_ptr().cast_mut().cast();
        if self.row.load(Ordering::Relaxed) == at && self.places.load(Ordering::Relaxed) == places {
            return None;
        }
        self.row.store(at, Ordering::Relaxed);
        self.places.store(places, Ordering::Relaxed);
        Some(Moved { address: at.addr(), bytes: size_of_val(row) })
    }

    /// Asks for the places, each of a `T`, in which a key with this hash stands.
    pub(crate) fn fetch<T>(&self, hash: u32) {
        let home = home(hash, self.places.load(Ordering::Relaxed));
        let first = self.row.load(Ordering::Relaxed).cast::<T>().wrapping_add(home);
        for place in 0..PLACES {
            fetch(first.wrapping_add(place));
        }
    }
}

/// A row that lies elsewhere than before. It has huge pages from the end of this value on, if it is worth that.
#[derive(Debug)]
pub(crate) struct Moved {
    address: usize,
    bytes: usize,
}

/// The size of a huge page, and of a row that gets them.
const HUGE: usize = 2 << 20;
const WORTHWHILE: usize = HUGE / 2;

impl Drop for Moved {
    fn drop(&mut self) {
        if self.bytes >= WORTHWHILE {
            let first = self.address / HUGE * HUGE;
            let end = (self.address + self.bytes).next_multiple_of(HUGE);
            collapse(first, end - first);
        }
    }
}

/// The place that a hash asks for, of so many.
pub(crate) fn home(hash: u32, places: u32) -> usize {
    ((u64::from(hash) * u64::from(places)) >> 32) as usize
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the standard library has no safe way to ask for memory ahead")]
fn fetch<T>(at: *const T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing that the program could see and never faults, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
fn fetch<T>(_at: *const T) {}

/// Has the system put what lies there into huge pages, if it can. Nothing else changes, whosesoever memory it is: a row's
/// first and last pages are shared with what lies next to it.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "no safe wrapper has this advice")]
fn collapse(address: usize, bytes: usize) {
    // SAFETY: this advice changes no contents, and where nothing is mapped it fails.
    unsafe {
        libc::madvise(ptr::without_provenance_mut(address), bytes, libc::MADV_COLLAPSE);
    }
}

#[cfg(not(target_os = "linux"))]
fn collapse(_address: usize, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_noted_when_it_moves_or_grows_and_not_otherwise() {
        let (hint, rows) = (Hint::new(), [[0_u64; 4]; 2]);
        let note = |row: &[u64], places| hint.note(row, places).is_some();
        assert!(note(&rows[0], 4));
        assert!(!note(&rows[0], 4));
        assert!(note(&rows[0], 5));
        assert!(note(&rows[1], 5));
        assert!(!note(&rows[1], 5));
    }

    #[test]
    fn memory_may_be_asked_for_wherever_it_is() {
        Hint::new().fetch::<[u8; 64]>(u32::MAX);
        let hint = Hint::new();
        hint.note(&[[0_u8; 64]; 3], u32::MAX);
        [0, 1 << 31, u32::MAX].iter().for_each(|hash| hint.fetch::<[u8; 64]>(*hash));
    }

    #[test]
    fn huge_pages_change_nothing_but_the_pages() {
        let row: Vec<usize> = (0..HUGE).collect();
        drop(Moved { address: row.as_ptr().addr(), bytes: size_of_val(&row[..]) });
        drop(Moved { address: 0, bytes: HUGE });
        assert!(row.iter().enumerate().all(|(at, number)| at == *number));
    }
}
