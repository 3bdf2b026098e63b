//! Generated crowds: each pattern is found in a crowd that shows it, and nothing in those of people.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a generator may panic; the test then fails"
)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use weir_core::sale::Sku;
use weir_core::sale::anomaly::{Anomaly, AnomalyWatch, Attempt, Pattern};
use weir_core::{Timestamp, UserId};

const START: i64 = 1_771_149_600_000;
const CHROME: &str = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0";
const NAMES: [&str; 8] = ["ada", "bob", "chen", "dina", "eli", "fatima", "goran", "hana"];

/// An attempt of a generated crowd, `at` milliseconds after the start.
#[derive(Clone, Debug)]
struct Try {
    at: i64,
    user: String,
    address: IpAddr,
    agent: Option<&'static str>,
}

/// Numbers that look random and are the same in every run with the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn v4(bits: u64) -> IpAddr {
    Ipv4Addr::from_bits(bits as u32).into()
}

/// Returns the anomalies that a crowd shows, oldest first.
fn watch(mut crowd: Vec<Try>) -> Vec<Anomaly> {
    crowd.sort_by_key(|attempt| attempt.at);
    let mut watch = AnomalyWatch::new();
    let mut sightings = 0;
    for attempt in &crowd {
        sightings += record(&mut watch, attempt, "W");
    }
    let mut found: Vec<_> = watch.list(None).cloned().collect();
    found.reverse();
    assert_eq!(found.is_empty(), sightings == 0);
    found
}

fn record(watch: &mut AnomalyWatch, attempt: &Try, sku: &str) -> usize {
    let (sku, user) = (Sku::parse(sku).unwrap(), UserId::parse(attempt.user.as_str()).unwrap());
    let now = Timestamp::from_micros((START + attempt.at) * 1_000);
    watch
        .record(&Attempt { sku: &sku, user: &user, address: attempt.address, agent: attempt.agent }, now)
        .len()
}

fn patterns(found: &[Anomaly]) -> Vec<Pattern> {
    found.iter().map(|anomaly| anomaly.pattern).collect()
}

/// A name as people have it: some with a year, some with a number of their own.
fn person(n: u64, dice: &mut Dice) -> String {
    let name = NAMES[dice.roll(8) as usize];
    let host = ["gmail.com", "example.org", "mail.example"][dice.roll(3) as usize];
    match dice.roll(3) {
        0 => format!("{name}{}.{n:x}z@{host}", 1950 + dice.roll(60)),
        1 => format!("{name}.{:x}q{}@{host}", dice.roll(1 << 40), dice.roll(100)),
        _ => format!("{name}-{:x}y@{host}", n * 7919),
    }
}

/// People from all over, one in twelve of them of the largest carrier, who share its few addresses. Some try again.
fn ordinary(people: u64, over_ms: u64, seed: u64) -> Vec<Try> {
    let mut dice = Dice(seed);
    let mut crowd = Vec::new();
    for n in 0..people {
        let address = if dice.roll(12) == 0 { 0x0a00_0000 + dice.roll(64) } else { dice.roll(1 << 31) };
        let agent = if dice.roll(20) == 0 { Some("ShopApp/3.1 CFNetwork/1490") } else { Some(CHROME) };
        let (user, first) = (person(n, &mut dice), dice.roll(over_ms));
        for again in 0..=dice.roll(3) {
            let at = (first + again * (1_200 + dice.roll(3_000))) as i64;
            crowd.push(Try { at, user: user.clone(), address: v4(address), agent });
        }
    }
    crowd
}

/// People behind one address, who all come at the opening and try some more.
fn nat(people: u64, address: IpAddr, user: impl Fn(u64) -> String, seed: u64) -> Vec<Try> {
    let mut dice = Dice(seed);
    let mut crowd = Vec::new();
    for n in 0..people {
        let first = dice.roll(1_000);
        for again in 0..4 {
            let at = (first + again * (1_500 + dice.roll(1_500))) as i64;
            crowd.push(Try { at, user: user(n), address, agent: Some(CHROME) });
        }
    }
    crowd
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn an_ordinary_crowd_shows_nothing(seed in any::<u64>(), over_ms in prop::sample::select(vec![600, 5_000, 60_000])) {
        let found = watch(ordinary(10_000, over_ms, seed));
        // The largest carrier's network has a twelfth of the attempts, which is less than the share of a spike.
        prop_assert_eq!(found, []);
    }

    #[test]
    fn two_hundred_people_behind_one_address_show_nothing(seed in any::<u64>(), others in 0..2_000_u64) {
        let mut dice = Dice(seed);
        let numbers: Vec<u64> = (0..200).map(|_| 10_000 + dice.roll(90_000)).collect();
        let mut order: Vec<u64> = (0..200).collect();
        (1..200).for_each(|n| order.swap(n, dice.roll(n as u64 + 1) as usize));
        let address: IpAddr = if seed % 2 == 0 { v4(0xc0a8_0101) } else { Ipv6Addr::from_bits(1 << 90).into() };
        for user in [
            &(|n: u64| person(n, &mut Dice(seed.wrapping_add(n)))) as &dyn Fn(u64) -> String,
            &|n| format!("emp{}", numbers[n as usize]),
            // Even with the numbers of a list, since they do not come in its order.
            &|n| format!("emp{:03}@corp.example", order[n as usize]),
        ] {
            let mut crowd = nat(200, address, user, seed);
            crowd.extend(ordinary(others, 5_000, seed ^ 1));
            prop_assert_eq!(watch(crowd), []);
        }
    }

    #[test]
    fn customers_with_numbers_show_nothing(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let crowd = (0..5_000).map(|_| Try {
            at: dice.roll(30_000) as i64,
            user: dice.roll(1_000_000).to_string(),
            address: v4(dice.roll(1 << 31)),
            agent: Some(CHROME),
        });
        prop_assert_eq!(watch(crowd.collect()), []);
    }

    /// A network that sends 200 attempts a second, one or two in each of which any of its hosts makes.
    #[test]
    fn a_spike_of_a_network_is_found(seed in any::<u64>(), is_v4 in any::<bool>()) {
        let mut dice = Dice(seed);
        let mut crowd = ordinary(2_000, 10_000, seed);
        crowd.extend((0..3_000).map(|n| Try {
            at: n * 5,
            user: person(100_000 + n as u64, &mut dice),
            address: if is_v4 {
                v4(0xcb00_7100 + n as u64 % 254)
            } else {
                Ipv6Addr::from_bits((0x2001_0db8_u128 << 96) + n as u128 % 254).into()
            },
            agent: Some(CHROME),
        }));
        let found = watch(crowd);
        let spike: Vec<_> = found.iter().filter(|a| a.pattern == Pattern::NetworkSpike).collect();
        prop_assert_eq!(spike.len(), 1, "{:?}", found);
        prop_assert_eq!(&*spike[0].key, if is_v4 { "203.0.113.0/24" } else { "2001:db8::/64" });
        prop_assert!(spike[0].count >= 1_500 && spike[0].first_seen < spike[0].last_seen);
        // A /64 counts as one address, so its users are too many as well.
        prop_assert_eq!(found.len(), if is_v4 { 1 } else { 2 }, "{:?}", found);
    }

    /// In order, or shuffled as concurrent calls are; from anywhere, between people.
    #[test]
    fn user_ids_that_count_up_are_found(seed in any::<u64>(), spread_ms in prop::sample::select(vec![0, 60, 150])) {
        let mut dice = Dice(seed);
        let mut crowd = ordinary(3_000, 20_000, seed);
        crowd.extend((1..=400).map(|n| Try {
            at: n * 20 + dice.roll(spread_ms + 1) as i64,
            user: format!("user{n:03}@example.com"),
            address: v4(dice.roll(1 << 31)),
            agent: Some(CHROME),
        }));
        let found = watch(crowd);
        prop_assert_eq!(patterns(&found), [Pattern::SequentialUsers]);
        prop_assert_eq!(&*found[0].key, "user#@example.com");
    }

    #[test]
    fn a_block_of_user_ids_is_found_in_any_order(seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let crowd = (1..=999).map(|n| Try {
            at: dice.roll(30_000) as i64,
            user: format!("bot-{n}-x"),
            address: v4(dice.roll(1 << 31)),
            agent: Some(CHROME),
        });
        let found = watch(crowd.collect());
        prop_assert_eq!(patterns(&found), [Pattern::SequentialUsers]);
        prop_assert_eq!(&*found[0].key, "bot-#-x");
    }

    #[test]
    fn clients_that_are_no_browsers_are_found_above_half(seed in any::<u64>(), others in 0..=100_u64) {
        let mut dice = Dice(seed);
        let crowd = (0..2_000).map(|n| Try {
            at: n * 10,
            user: person(n as u64, &mut dice),
            address: v4(dice.roll(1 << 31)),
            agent: if (n as u64 * 37) % 100 < others { [Some("python-requests/2.31"), None][usize::from(n % 5 == 0)] } else { Some(CHROME) },
        });
        let found = watch(crowd.collect());
        if others > 52 {
            prop_assert_eq!(patterns(&found), [Pattern::NonBrowserAgents]);
            prop_assert_eq!(&*found[0].key, "python-requests");
        } else if others < 40 {
            prop_assert_eq!(found, []);
        }
    }

    #[test]
    fn an_address_with_more_users_than_people_is_found(seed in any::<u64>(), is_scripted in any::<bool>()) {
        let mut dice = Dice(seed);
        let users = if is_scripted { 60 } else { 500 };
        let mut crowd = ordinary(2_000, 30_000, seed);
        crowd.extend((0..users).map(|n| Try {
            at: n * 100,
            user: person(100_000 + n as u64, &mut dice),
            address: v4(0xcb00_7107),
            agent: Some(if is_scripted { "curl/8.5.0" } else { CHROME }),
        }));
        let found = watch(crowd);
        prop_assert_eq!(patterns(&found), [Pattern::ManyUsersOneAddress]);
        prop_assert_eq!(&*found[0].key, "203.0.113.7");
    }
}

#[test]
fn one_that_goes_on_is_one_and_one_that_returns_is_another() {
    let mut watch = AnomalyWatch::new();
    let mut at = |seconds: std::ops::Range<i64>| {
        for n in seconds.start * 100..seconds.end * 100 {
            let (user, address) = (format!("u{:x}x", n * 7919), v4(0xcb00_7107));
            record(&mut watch, &Try { at: n * 10, user, address, agent: Some(CHROME) }, "W");
        }
        watch.list(None).filter(|a| a.pattern == Pattern::ManyUsersOneAddress).count()
    };
    assert_eq!(at(0..20), 1);
    assert_eq!(at(60..80), 1, "a pause of less than a minute");
    assert_eq!(at(300..320), 2);
}

#[test]
fn sales_are_looked_at_one_by_one() {
    let mut watch = AnomalyWatch::new();
    for n in 0..400 {
        let attempt =
            Try { at: n * 50, user: format!("u{n}"), address: v4(n as u64 * 70_001), agent: Some(CHROME) };
        record(&mut watch, &attempt, if n % 2 == 0 { "EVEN" } else { "ODD" });
    }
    assert_eq!(watch.list(None).count(), 0, "every second number is no sequence");
    for n in 0..400 {
        let attempt = Try {
            at: 20_000 + n * 50,
            user: format!("w{n}"),
            address: v4(n as u64 * 70_001),
            agent: Some(CHROME),
        };
        record(&mut watch, &attempt, "ODD");
    }
    let found: Vec<_> = watch.list(None).map(|a| (a.sku.as_str(), &*a.key)).collect();
    assert_eq!(found, [("ODD", "w#")]);
}

#[test]
fn an_attack_is_found_in_a_flood_of_other_subjects() {
    let mut dice = Dice(7);
    let mut watch = AnomalyWatch::new();
    for n in 0..60_000_i64 {
        // Each from another network, with another form of id and for another sale: all that could fill the memory.
        let noise = Try {
            at: n,
            user: format!("{:x}g{}", dice.roll(1 << 40), n),
            address: v4(dice.roll(1 << 31)),
            agent: None,
        };
        record(&mut watch, &noise, &format!("S{}", n % 5_000));
        if n % 40 == 0 {
            let attack =
                Try { at: n, user: format!("user{}", n / 40), address: v4(0xcb00_7107), agent: Some(CHROME) };
            record(&mut watch, &attack, "W");
        }
    }
    let mut found: Vec<_> = watch.list(None).filter(|a| a.sku.as_str() == "W").map(|a| a.pattern).collect();
    found.sort();
    assert_eq!(found, [Pattern::SequentialUsers, Pattern::ManyUsersOneAddress]);
    assert!(watch.list(None).count() <= 1_000);
}

#[test]
fn the_list_is_read_page_by_page_from_the_latest() {
    let mut watch = AnomalyWatch::new();
    for (sale, n) in (0..5).flat_map(|sale| (0..150).map(move |n| (sale, n))) {
        let attempt = Try {
            at: sale * 1_500 + n * 10,
            user: format!("u{n}"),
            address: v4(n as u64 * 70_001),
            agent: Some(CHROME),
        };
        record(&mut watch, &attempt, &format!("S{sale}"));
    }
    let all: Vec<_> = watch.list(None).map(|a| a.id).collect();
    assert_eq!(all, [5, 4, 3, 2, 1]);
    assert_eq!(watch.list(Some(3)).map(|a| a.id).collect::<Vec<_>>(), [2, 1]);
}
