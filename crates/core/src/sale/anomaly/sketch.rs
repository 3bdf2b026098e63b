//! Which subjects are frequent, in a fixed amount of memory: a count-min sketch of the last one or two turns. Whatever occurs
//! often is found; with a small probability, something rare is taken for frequent as well, and only costs a place.

use super::sliding::Step;

const CELLS: usize = 1 << 18;
/// How many steps a turn takes.
const TURN: u64 = 2;

#[derive(Debug)]
pub(super) struct Sketch {
    current: Turn,
    previous: Turn,
    begun: Step,
}

/// The counts of a turn, in two rows.
#[derive(Debug)]
struct Turn([Box<[u8]>; 2]);

impl Turn {
    fn new() -> Self {
        Self([0, 1].map(|_| vec![0_u8; CELLS].into_boxed_slice()))
    }

    fn get(&self, hash: u64) -> u8 {
        let rows = self.0.iter().zip(cells(hash));
        rows.filter_map(|(row, cell)| row.get(cell)).copied().min().unwrap_or_default()
    }

    fn add(&mut self, hash: u64) {
        for (row, cell) in self.0.iter_mut().zip(cells(hash)) {
            if let Some(count) = row.get_mut(cell) {
                *count = count.saturating_add(1);
            }
        }
    }
}

impl Sketch {
    pub(super) fn new() -> Self {
        Self { current: Turn::new(), previous: Turn::new(), begun: Step::default() }
    }

    /// Counts a subject. Returns how often it occurred in this turn and the one before, or more.
    pub(super) fn add(&mut self, hash: u64, now: Step) -> u16 {
        if now.since(self.begun) >= TURN {
            std::mem::swap(&mut self.current, &mut self.previous);
            self.current.0.iter_mut().for_each(|row| row.fill(0));
            if now.since(self.begun) >= TURN.saturating_mul(2) {
                self.previous.0.iter_mut().for_each(|row| row.fill(0));
            }
            self.begun = now;
        }
        self.current.add(hash);
        u16::from(self.current.get(hash)).saturating_add(u16::from(self.previous.get(hash)))
    }
}

/// The cell of each row.
fn cells(hash: u64) -> [usize; 2] {
    [hash, hash >> 32].map(|part| usize::try_from(part & u64::from(u32::MAX)).unwrap_or_default() % CELLS)
}
