//! Numbers in user ids: `user017@example.com` is number 17 of `user#@example.com`.

/// The most runs of digits of an id that are looked at, from its end.
const RUNS_MAX: usize = 3;
/// The most digits of a number. Longer runs are no counters.
const DIGITS_MAX: usize = 18;

/// A number of an id, and the id around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbered<'a> {
    pub(super) before: &'a str,
    pub(super) number: u64,
    pub(super) after: &'a str,
}

impl Numbered<'_> {
    pub(super) fn template(&self) -> String {
        format!("{}#{}", self.before, self.after)
    }
}

/// Returns the numbers of an id, the last first.
pub(super) fn numbers(id: &str) -> impl Iterator<Item = Numbered<'_>> {
    let mut end = id.len();
    let runs = std::iter::from_fn(move || {
        let head = id.get(..end)?;
        let stop = head.rfind(|c: char| c.is_ascii_digit())?.saturating_add(1);
        let digits = id.get(..stop)?;
        let start = digits.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        end = start;
        Some((start, stop))
    });
    runs.take(RUNS_MAX).filter_map(move |(start, stop)| {
        let digits = id.get(start..stop).filter(|digits| digits.len() <= DIGITS_MAX)?;
        Some(Numbered { before: id.get(..start)?, number: digits.parse().ok()?, after: id.get(stop..)? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(id: &str) -> Vec<(String, u64)> {
        numbers(id).map(|numbered| (numbered.template(), numbered.number)).collect()
    }

    #[test]
    fn every_run_of_digits_is_a_number() {
        assert_eq!(found("user007"), [("user#".to_owned(), 7)]);
        assert_eq!(found("a1b22@x.com"), [("a1b#@x.com".to_owned(), 22), ("a#b22@x.com".to_owned(), 1)]);
        assert_eq!(found("42"), [("#".to_owned(), 42)]);
        assert_eq!(found("1-2-3-4").len(), RUNS_MAX);
        assert_eq!(found("héllo9ö"), [("héllo#ö".to_owned(), 9)]);
        assert_eq!(found("1234567890123456789"), []);
        assert_eq!((found("ada"), found("")), (vec![], vec![]));
    }
}
