//! Random bytes of the system, asked for in advance: a call to the system takes longer than what it is wanted for.

use std::cell::RefCell;

/// So many bytes are asked for at once.
const POOL: usize = 1_024;

struct Pool {
    bytes: [u8; POOL],
    used: usize,
}

thread_local! {
    static THIS: RefCell<Pool> = const { RefCell::new(Pool { bytes: [0; POOL], used: POOL }) };
}

/// Bytes that nobody can guess and nobody gets twice.
///
/// # Errors
/// When the system gives none.
pub(crate) fn bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    const { assert!(N <= POOL) };
    THIS.with_borrow_mut(|pool| {
        if pool.used + N > POOL {
            getrandom::fill(&mut pool.bytes).map_err(std::io::Error::other)?;
            pool.used = 0;
        }
        let mut bytes = [0; N];
        let taken = &mut pool.bytes[pool.used..pool.used + N];
        bytes.copy_from_slice(taken);
        // What was handed out is not kept.
        taken.fill(0);
        pool.used += N;
        Ok(bytes)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn nobody_gets_the_same_bytes_twice_on_any_thread() {
        let draw = || (0..1_000).map(|_| bytes::<12>().unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(draw)).collect();
        let all: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 4_000);
        assert!(all.iter().all(|bytes| bytes.iter().any(|byte| *byte != 0)));
    }
}
