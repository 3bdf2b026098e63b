//! Anomalies: attempts to buy that do not look like a crowd of people. Nothing is refused because of them; operators are told.
//!
//! Four patterns are looked for, each in the attempts of the last minute or less (the constants below). The memory is bounded
//! whatever comes: a sketch finds subjects (a network, an address, a form of user ids, a sale) that occur often, and only those
//! are looked at closely.

mod found;
mod numbered;
mod sketch;
mod sliding;
mod subject;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use self::found::Anomaly;
use self::found::Found;
use self::numbered::Numbered;
use self::sketch::Sketch;
use self::sliding::Step;
use self::subject::{Evidence, Subjects};
use super::Sku;
use crate::{Timestamp, UserId};

/// Attempts of one network in 10 s that are a spike, if they also are a tenth of all attempts.
pub const SPIKE_ATTEMPTS: u64 = 1_500;
/// The part of all attempts that a spike has at least: one in this many.
pub const SPIKE_SHARE: u64 = 10;
/// Users of one address in a minute that are too many for a household, an office, or a school.
pub const ADDRESS_USERS: usize = 300;
/// The same, of users most of whom do not even claim to use a browser.
pub const ADDRESS_SCRIPTED_USERS: usize = 30;
/// Users in a minute whose ids are alike but for a number, and three fifths of whom come shortly after a neighbour. Counted up by
/// calls that overtake each other, two thirds or more do.
pub const SEQUENCE_USERS: u64 = 100;
/// Users in a minute whose ids are alike but for a number, and who leave hardly any number out, in whatever order.
pub const BLOCK_USERS: usize = 500;
/// Attempts in a minute from which the kinds of clients are compared.
pub const AGENTS_ATTEMPTS: u64 = 100;

/// What a group of attempts has in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pattern {
    /// Very many attempts from one network: a /24, or of IPv6 a /64.
    NetworkSpike,
    /// User ids that count up, or are taken from a block of numbers.
    SequentialUsers,
    /// More than half of the attempts at a sale do not name a browser.
    NonBrowserAgents,
    /// More users of one address (of IPv6, one /64) than people behind it could be.
    ManyUsersOneAddress,
}

impl Pattern {
    pub const ALL: [Self; 4] =
        [Self::NetworkSpike, Self::SequentialUsers, Self::NonBrowserAgents, Self::ManyUsersOneAddress];

    /// Returns the name on the wire and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NetworkSpike => "network_spike",
            Self::SequentialUsers => "sequential_users",
            Self::NonBrowserAgents => "non_browser_agents",
            Self::ManyUsersOneAddress => "many_users_one_address",
        }
    }
}

/// An attempt to buy.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    pub sku: &'a Sku,
    pub user: &'a UserId,
    pub address: IpAddr,
    /// What the client calls itself, if it says.
    pub agent: Option<&'a str>,
}

impl Attempt<'_> {
    /// Whether the client claims to be a browser: the name of each begins in the same way.
    #[must_use]
    pub fn is_browser(&self) -> bool {
        self.agent.is_some_and(|agent| agent.starts_with("Mozilla/"))
    }
}

/// An anomaly that an attempt belongs to.
#[derive(Clone, Debug)]
pub struct Sighting {
    pub pattern: Pattern,
    /// The anomaly, if the attempt is the one by which it was found.
    pub found: Option<Anomaly>,
}

/// Looks at attempts one by one.
#[derive(Debug)]
pub struct AnomalyWatch {
    sketch: Sketch,
    networks: Subjects,
    addresses: Subjects,
    templates: Subjects,
    sales: Subjects,
    found: Found,
    now: Step,
}

impl Default for AnomalyWatch {
    fn default() -> Self {
        Self::new()
    }
}

impl AnomalyWatch {
    #[must_use]
    pub fn new() -> Self {
        let subjects = Subjects::default;
        Self {
            sketch: Sketch::new(),
            networks: subjects(),
            addresses: subjects(),
            templates: subjects(),
            sales: subjects(),
            found: Found::default(),
            now: Step::default(),
        }
    }

    /// Looks at an attempt. Returns the anomalies that it belongs to.
    pub fn record(&mut self, attempt: &Attempt<'_>, now: Timestamp) -> Vec<Sighting> {
        self.now = self.now.max(Step::of(now));
        let sale = self.look(attempt, now, &Subject::Sale);
        let all = self.sales.recent_attempts(Subject::Sale.hash(attempt), self.now);
        let network = self.look(attempt, now, &Subject::Network(network(attempt.address), all));
        let address = self.look(attempt, now, &Subject::Address(site(attempt.address)));
        let mut sightings: Vec<_> = [sale, network, address].into_iter().flatten().collect();
        for numbered in numbered::numbers(attempt.user.as_str()) {
            let sighting = self.look(attempt, now, &Subject::Template(numbered));
            if sighting.is_some() {
                sightings.extend(sighting);
                break;
            }
        }
        sightings
    }

    /// Returns the anomalies found, the latest first, that were found before the one with the id `before`.
    pub fn list(&self, before: Option<u64>) -> impl Iterator<Item = &Anomaly> {
        self.found.list(before)
    }

    /// Counts the attempt for a subject, if that is frequent. Returns the anomaly that the subject shows.
    fn look(&mut self, attempt: &Attempt<'_>, now: Timestamp, subject: &Subject<'_>) -> Option<Sighting> {
        let step = self.now;
        let hash = subject.hash(attempt);
        let subjects = match subject {
            Subject::Network(..) => &mut self.networks,
            Subject::Address(_) => &mut self.addresses,
            Subject::Template(_) => &mut self.templates,
            Subject::Sale => &mut self.sales,
        };
        if !subjects.contains(hash) {
            let count = self.sketch.add(hash, step);
            subjects.admit(hash, count, step, || (subject.evidence(), now))?;
        }
        let seen = subjects.add(hash, attempt, step)?;
        let is_shown = match subject {
            Subject::Network(_, all) => seen.is_spike(*all, step),
            _ => seen.is_anomalous(attempt, step),
        };
        is_shown.then(|| {
            let pattern = subject.pattern();
            let (since, count) = (seen.since(now), seen.count(step));
            let key = || subject.key().unwrap_or_else(|| seen.leading_agent(step));
            Sighting {
                pattern,
                found: self.found.record((pattern, hash), attempt.sku, key, since, count, now),
            }
        })
    }
}

/// What attempts are grouped by, each within one sale.
enum Subject<'a> {
    /// A network, and how many attempts there were at the sale.
    Network(IpAddr, u64),
    Address(IpAddr),
    Template(Numbered<'a>),
    Sale,
}

impl Subject<'_> {
    const fn pattern(&self) -> Pattern {
        match self {
            Self::Network(..) => Pattern::NetworkSpike,
            Self::Address(_) => Pattern::ManyUsersOneAddress,
            Self::Template(_) => Pattern::SequentialUsers,
            Self::Sale => Pattern::NonBrowserAgents,
        }
    }

    fn hash(&self, attempt: &Attempt<'_>) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.pattern(), attempt.sku.as_str()).hash(&mut hasher);
        match self {
            Self::Network(address, _) | Self::Address(address) => address.hash(&mut hasher),
            Self::Template(Numbered { before, after, .. }) => (before, after).hash(&mut hasher),
            Self::Sale => {}
        }
        hasher.finish()
    }

    fn evidence(&self) -> Evidence {
        match self {
            Self::Network(..) => Evidence::Attempts,
            Self::Address(_) => Evidence::users(),
            Self::Template(numbered) => Evidence::sequence(numbered),
            Self::Sale => Evidence::agents(),
        }
    }

    /// Returns what operators know the subject by; `None` if its attempts say it.
    fn key(&self) -> Option<String> {
        match self {
            Self::Network(address @ IpAddr::V4(_), _) => Some(format!("{address}/24")),
            Self::Network(address @ IpAddr::V6(_), _) | Self::Address(address @ IpAddr::V6(_)) => {
                Some(format!("{address}/64"))
            }
            Self::Address(address) => Some(address.to_string()),
            Self::Template(numbered) => Some(numbered.template()),
            Self::Sale => None,
        }
    }
}

/// Returns the /24 of an IPv4 address, or the /64 of an IPv6 address.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & 0xffff_ff00).into(),
        v6 @ IpAddr::V6(_) => site(v6),
    }
}

/// Returns an IPv4 address itself, or the /64 of an IPv6 address: whoever has one address of it has all of them.
fn site(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}
