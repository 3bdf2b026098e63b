//! Subjects that occur often, and what their attempts show.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::numbered::Numbered;
use super::sliding::{self, Recent, STEPS, Step};
use super::{
    ADDRESS_SCRIPTED_USERS, ADDRESS_USERS, AGENTS_ATTEMPTS, Attempt, BLOCK_USERS, SEQUENCE_USERS,
    SPIKE_ATTEMPTS, SPIKE_SHARE, numbered,
};
use crate::Timestamp;

/// The most subjects of a kind that are looked at closely.
const SUBJECTS_MAX: usize = 256;
/// How often a subject must have occurred before it is.
const FREQUENT: u16 = 16;
/// The most users of an address that are remembered.
const USERS_MAX: usize = 512;
/// The most numbers of a form of user ids that are remembered.
const NUMBERS_MAX: usize = 1_024;
/// A number is next to another if that is among as many before it.
const NEIGHBOURS: usize = 32;
/// The most names of clients that are told apart.
const AGENTS_MAX: usize = 32;
/// The longest name of a client that is kept.
const AGENT_LENGTH_MAX: usize = 64;
/// How often a block of numbers is measured: once in this many new numbers.
const MEASURED_EVERY: u64 = 64;
/// The steps in which a spike has to happen: 5 to 10 s.
const SPIKE_STEPS: usize = 2;

/// The frequent subjects of a kind.
#[derive(Debug, Default)]
pub(super) struct Subjects(BTreeMap<u64, Seen>);

/// What was seen of a subject.
#[derive(Debug)]
pub(super) struct Seen {
    since: Timestamp,
    attempts: Recent,
    evidence: Evidence,
}

/// What is remembered of a subject's attempts, beside their number.
#[derive(Debug)]
pub(super) enum Evidence {
    Attempts,
    Users(Users),
    Sequence(Sequence),
    /// The clients: how many were no browsers, and their names.
    Agents {
        others: Recent,
        names: Vec<(Box<str>, Recent)>,
    },
}

/// The users of an address: when each was last seen, and whether with a browser.
#[derive(Debug, Default)]
pub(super) struct Users {
    users: BTreeMap<u64, (Step, bool)>,
    /// Those who were not seen with a browser last.
    scripted: usize,
    purged: Step,
}

/// The numbers of user ids that are alike otherwise.
#[derive(Debug)]
pub(super) struct Sequence {
    /// The parts of the ids before and after the number.
    around: (Box<str>, Box<str>),
    numbers: BTreeMap<u64, Step>,
    latest: VecDeque<u64>,
    new: Recent,
    /// New numbers that came shortly after a neighbour.
    adjacent: Recent,
    counted: u64,
    is_block: bool,
    purged: Step,
}

impl Subjects {
    pub(super) fn contains(&self, hash: u64) -> bool {
        self.0.contains_key(&hash)
    }

    /// Begins to look at a subject that has occurred `count` times, if that is often. Makes room for it by forgetting the least
    /// frequent.
    pub(super) fn admit(
        &mut self,
        hash: u64,
        count: u16,
        now: Step,
        new: impl FnOnce() -> (Evidence, Timestamp),
    ) -> Option<()> {
        if count < FREQUENT {
            return None;
        }
        if self.0.len() >= SUBJECTS_MAX {
            let recent = |seen: &Seen| seen.attempts.sum(now, SPIKE_STEPS);
            let (least, fewest) =
                self.0.iter().map(|(hash, seen)| (*hash, recent(seen))).min_by_key(|(_, sum)| *sum)?;
            if fewest >= u64::from(count) {
                return None;
            }
            self.0.remove(&least);
        }
        let (evidence, since) = new();
        self.0.insert(hash, Seen { since, attempts: Recent::NONE, evidence });
        Some(())
    }

    pub(super) fn add(&mut self, hash: u64, attempt: &Attempt<'_>, now: Step) -> Option<&Seen> {
        let seen = self.0.get_mut(&hash)?;
        seen.attempts.add(now);
        seen.evidence.add(attempt, now);
        Some(seen)
    }

    /// Returns the attempts of a subject in the steps of a spike; 0 if it is not looked at.
    pub(super) fn recent_attempts(&self, hash: u64, now: Step) -> u64 {
        self.0.get(&hash).map_or(0, |seen| seen.attempts.sum(now, SPIKE_STEPS))
    }
}

impl Seen {
    /// Returns since when there have been attempts in the window that ends now.
    pub(super) fn since(&self, now: Timestamp) -> Timestamp {
        self.since.max(now.minus(sliding::length(self.evidence.steps())))
    }

    /// Returns the attempts that show the pattern, in its window.
    pub(super) fn count(&self, now: Step) -> u64 {
        let counted = match &self.evidence {
            Evidence::Agents { others, .. } => others,
            _ => &self.attempts,
        };
        counted.sum(now, self.evidence.steps())
    }

    /// Whether the subject's attempts are a spike among `all` of a sale.
    pub(super) fn is_spike(&self, all: u64, now: Step) -> bool {
        let attempts = self.attempts.sum(now, SPIKE_STEPS);
        attempts >= SPIKE_ATTEMPTS && attempts.saturating_mul(SPIKE_SHARE) >= all
    }

    /// Whether the subject shows its pattern, and `attempt` belongs to it.
    pub(super) fn is_anomalous(&self, attempt: &Attempt<'_>, now: Step) -> bool {
        match &self.evidence {
            Evidence::Attempts => false,
            Evidence::Users(users) => users.are_too_many(),
            Evidence::Sequence(sequence) => sequence.is_patterned(now),
            Evidence::Agents { others, .. } => {
                let all = self.attempts.sum(now, STEPS);
                let is_majority = others.sum(now, STEPS).saturating_mul(2) > all;
                !attempt.is_browser() && all >= AGENTS_ATTEMPTS && is_majority
            }
        }
    }

    /// Returns the most frequent client that is no browser.
    pub(super) fn leading_agent(&self, now: Step) -> String {
        let Evidence::Agents { names, .. } = &self.evidence else { return String::new() };
        let leading = names.iter().max_by_key(|(_, recent)| recent.sum(now, STEPS));
        leading.map(|(name, _)| name.to_string()).unwrap_or_default()
    }
}

impl Evidence {
    pub(super) fn users() -> Self {
        Self::Users(Users::default())
    }

    /// Returns the steps in which the pattern has to show.
    const fn steps(&self) -> usize {
        match self {
            Self::Attempts => SPIKE_STEPS,
            _ => STEPS,
        }
    }

    pub(super) const fn agents() -> Self {
        Self::Agents { others: Recent::NONE, names: Vec::new() }
    }

    pub(super) fn sequence(numbered: &Numbered<'_>) -> Self {
        Self::Sequence(Sequence {
            around: (numbered.before.into(), numbered.after.into()),
            numbers: BTreeMap::new(),
            latest: VecDeque::new(),
            new: Recent::NONE,
            adjacent: Recent::NONE,
            counted: 0,
            is_block: false,
            purged: Step::EPOCH,
        })
    }

    fn add(&mut self, attempt: &Attempt<'_>, now: Step) {
        match self {
            Self::Attempts => {}
            Self::Users(users) => users.add(attempt, now),
            Self::Sequence(sequence) => sequence.add(attempt.user.as_str(), now),
            Self::Agents { others, names } if !attempt.is_browser() => {
                others.add(now);
                count_name(names, agent_name(attempt.agent), now);
            }
            Self::Agents { .. } => {}
        }
    }
}

impl Users {
    fn add(&mut self, attempt: &Attempt<'_>, now: Step) {
        if std::mem::replace(&mut self.purged, now) != now {
            self.users.retain(|_, (seen, _)| now.can_see(*seen));
            self.scripted = self.users.values().filter(|(_, is_browser)| !is_browser).count();
        }
        let mut hasher = DefaultHasher::new();
        attempt.user.hash(&mut hasher);
        let (user, is_browser) = (hasher.finish(), attempt.is_browser());
        if self.users.len() >= USERS_MAX && !self.users.contains_key(&user) {
            return;
        }
        let before = self.users.insert(user, (now, is_browser));
        if before.is_some_and(|(_, was_browser)| !was_browser) {
            self.scripted = self.scripted.saturating_sub(1);
        }
        self.scripted = self.scripted.saturating_add(usize::from(!is_browser));
    }

    fn are_too_many(&self) -> bool {
        let is_scripted = self.scripted.saturating_mul(2) > self.users.len();
        let max = if is_scripted { ADDRESS_SCRIPTED_USERS } else { ADDRESS_USERS };
        self.users.len() > max
    }
}

impl Sequence {
    fn add(&mut self, user: &str, now: Step) {
        let (before, after) = (&*self.around.0, &*self.around.1);
        let mut numbers = numbered::numbers(user);
        let Some(Numbered { number, .. }) = numbers.find(|n| n.before == before && n.after == after) else {
            return;
        };
        if std::mem::replace(&mut self.purged, now) != now {
            self.numbers.retain(|_, seen| now.can_see(*seen));
            self.measure();
        }
        if let Some(seen) = self.numbers.get_mut(&number) {
            *seen = now;
            return;
        }
        self.new.add(now);
        if self.latest.iter().any(|other| other.abs_diff(number) == 1) {
            self.adjacent.add(now);
        }
        if self.latest.len() >= NEIGHBOURS {
            self.latest.pop_front();
        }
        self.latest.push_back(number);
        if self.numbers.len() < NUMBERS_MAX {
            self.numbers.insert(number, now);
        }
        self.counted = self.counted.saturating_add(1);
        if self.counted.checked_rem(MEASURED_EVERY) == Some(0) {
            self.measure();
        }
    }

    /// Looks whether the numbers leave out no more than one in ten.
    fn measure(&mut self) {
        let ends = self.numbers.first_key_value().zip(self.numbers.last_key_value());
        let span = ends.map_or(0, |((first, _), (last, _))| last.saturating_sub(*first).saturating_add(1));
        let count = u64::try_from(self.numbers.len()).unwrap_or(u64::MAX);
        self.is_block =
            self.numbers.len() >= BLOCK_USERS && count.saturating_mul(10) >= span.saturating_mul(9);
    }

    fn is_patterned(&self, now: Step) -> bool {
        let [new, adjacent] = [self.new, self.adjacent].map(|recent| recent.sum(now, STEPS));
        self.is_block || (new >= SEQUENCE_USERS && adjacent.saturating_mul(5) >= new.saturating_mul(3))
    }
}

/// Returns the name of a client without its version.
fn agent_name(agent: Option<&str>) -> &str {
    let name = agent.unwrap_or_default().split(['/', ' ', '(']).next().unwrap_or_default();
    let is_plain = name.len() <= AGENT_LENGTH_MAX && name.chars().all(|c| c.is_ascii_graphic());
    match name {
        "" => "(none)",
        name if is_plain => name,
        _ => "(other)",
    }
}

/// Counts a name. When there are too many names, it replaces the least frequent.
fn count_name(names: &mut Vec<(Box<str>, Recent)>, name: &str, now: Step) {
    if let Some((_, recent)) = names.iter_mut().find(|(known, _)| &**known == name) {
        return recent.add(now);
    }
    if names.len() >= AGENTS_MAX {
        let least = names.iter().enumerate().min_by_key(|(_, (_, recent))| recent.sum(now, STEPS));
        if let Some((index, _)) = least {
            names.swap_remove(index);
        }
    }
    let mut recent = Recent::NONE;
    recent.add(now);
    names.push((name.into(), recent));
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::UserId;
    use crate::sale::Sku;

    const NOW: Step = Step::EPOCH;

    /// Adds an attempt for each user to the evidence.
    fn fill(evidence: &mut Evidence, users: impl Iterator<Item = (String, String)>) {
        let sku = Sku::parse("W").unwrap();
        for (user, agent) in users {
            let user = UserId::parse(user).unwrap();
            let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
            evidence.add(&Attempt { sku: &sku, user: &user, address, agent: Some(&agent) }, NOW);
        }
    }

    #[test]
    fn what_is_remembered_of_a_subject_is_bounded() {
        let many = || (0..5_000).map(|n| (format!("u{n}"), format!("agent{n}/1")));
        let [mut users, mut agents] = [Evidence::users(), Evidence::agents()];
        let mut sequence = Evidence::sequence(&Numbered { before: "u", number: 0, after: "" });
        [&mut users, &mut agents, &mut sequence].into_iter().for_each(|evidence| fill(evidence, many()));
        let (Evidence::Users(users), Evidence::Agents { names, .. }, Evidence::Sequence(sequence)) =
            (users, agents, sequence)
        else {
            panic!("other evidence");
        };
        assert_eq!((users.users.len(), names.len()), (USERS_MAX, AGENTS_MAX));
        assert_eq!((sequence.numbers.len(), sequence.latest.len()), (NUMBERS_MAX, NEIGHBOURS));
        assert!(users.are_too_many() && sequence.is_patterned(NOW));
    }

    #[test]
    fn there_are_no_more_subjects_than_the_bound_and_the_frequent_ones_stay() {
        let mut subjects = Subjects::default();
        let sku = Sku::parse("W").unwrap();
        let user = UserId::parse("u").unwrap();
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let attempt = Attempt { sku: &sku, user: &user, address, agent: None };
        let new = || (Evidence::Attempts, Timestamp::EPOCH);
        assert_eq!(subjects.admit(0, FREQUENT - 1, NOW, new), None, "not frequent enough");
        for hash in 0..1_000 {
            let _ = subjects.admit(hash, FREQUENT, NOW, new);
            for _ in 0..hash % 40 {
                subjects.add(hash, &attempt, NOW);
            }
            assert!(subjects.0.len() <= SUBJECTS_MAX);
        }
        let kept = |hash: &u64| subjects.contains(*hash);
        assert!((0..200).filter(|hash| hash % 40 > 16).all(|hash| kept(&hash)));
        assert_eq!((0..200).filter(|hash| hash % 40 < 16).filter(kept).count(), 0);
    }
}
