use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{LimitUsage, Plan, Tier, TierHeaders, TierLimits};
use weir_core::{ManualClock, PolicyName, Timestamp, UserId};
use weir_store::tier::PolicySpec;

use super::limits::CheckDecision;
use super::*;
use crate::settings::source::{Sources, flatten_toml};
use crate::tier::settings::policy_input::PolicyFields;

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);

/// The service on the embedded engine, with a clock that stands still.
pub(super) struct ServiceFixture {
    pub(super) service: TierService,
    clock: ManualClock,
    _engines: Engines,
}

async fn fixture_with(data: &Path, clock: &ManualClock, file: &str) -> ServiceFixture {
    fixture_on(data, clock, file, |store| store).await
}

/// The service on a store that is put in front of the embedded engine.
pub(super) async fn fixture_on(
    data: &Path,
    clock: &ManualClock,
    file: &str,
    in_front: impl FnOnce(Arc<dyn TierStore>) -> Arc<dyn TierStore>,
) -> ServiceFixture {
    let path = Path::new("weir.toml");
    let environment = BTreeMap::from([("WEIR_DATA".to_owned(), data.display().to_string())]);
    let file = Some((path.to_owned(), flatten_toml(path, file).unwrap()));
    let settings = Settings::read(Sources { environment, file, ..Sources::default() }).unwrap();
    let mut engines = Engines::open(&settings, Some(Arc::new(clock.clone()))).await.unwrap();
    engines.store.tiers = in_front(engines.store.tiers);
    let service = TierService::start(&engines, &settings, &Metrics::default());
    service.load().await.unwrap();
    ServiceFixture { service, clock: clock.clone(), _engines: engines }
}

async fn fixture(data: &Path) -> ServiceFixture {
    fixture_with(data, &ManualClock::at(START), "").await
}

fn bucket(capacity: i128, refill: i128) -> PolicySpec {
    let fields = PolicyFields {
        kind: Some("token_bucket".to_owned()),
        capacity: Some(capacity),
        refill: Some(refill),
        period: Some("PT1M".to_owned()),
        ..PolicyFields::default()
    };
    fields.into_spec().unwrap()
}

impl ServiceFixture {
    async fn stop(self) {
        self.service.drain().await;
    }

    async fn put(&self, name: &str, spec: PolicySpec) {
        let name = PolicyName::parse(name).unwrap();
        assert!(self.service.put_policy(&name, &PolicyDefinition::Limit(spec)).await.unwrap());
    }

    async fn check(&self, checks: &[(&str, &str, u32)]) -> CheckDecision {
        let checks: Vec<_> = checks.iter().map(|&(policy, key, cost)| Check { policy, key, cost }).collect();
        match self.service.check(&checks, CheckOptions::default()).await.unwrap() {
            CheckOutcome::Decided(decision) => decision,
            CheckOutcome::UnknownPolicy(at) => panic!("the policy at {at} is unknown"),
        }
    }

    async fn remaining(&self, policy: &str, key: &str) -> u32 {
        self.check(&[(policy, key, 0)]).await.checks[0].limit_state.remaining
    }

    async fn subscribe(&self, user: &str, plan: Plan) {
        self.service.put_subscription(&UserId::parse(user).unwrap(), plan.into()).await.unwrap();
    }
}

fn remaining(admission: &Admission) -> u64 {
    assert!(matches!(admission, Admission::Allowed(_)), "{admission:?}");
    admission.headers().remaining
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_200_parallel_calls_of_a_free_user_exactly_8_pass() {
    let data = tempfile::tempdir().unwrap();
    let fixture = Arc::new(fixture(data.path()).await);
    let calls: Vec<_> = (0..200)
        .map(|_| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move { fixture.service.admit("u").await.unwrap() })
        })
        .collect();
    let mut passed = 0;
    for call in calls {
        passed += u32::from(matches!(call.await.unwrap(), Admission::Allowed(_)));
    }
    assert_eq!(passed, 8);
}

#[tokio::test]
async fn the_minute_is_refused_with_its_message_and_refills_to_the_millisecond() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    for left in (0..8).rev() {
        assert_eq!(remaining(&fixture.service.admit("u").await.unwrap()), left);
    }
    let denied = fixture.service.admit("u").await.unwrap();
    let Admission::Denied { headers, message } = &denied else { panic!("{denied:?}") };
    assert_eq!(message, "Rate limit exceeded. Maximum 5 AI requests per minute. Please try again shortly.");
    assert_eq!((headers.limit, headers.remaining, headers.retry_after_s), (5, 0, Some(12)));
    let me = fixture.service.user_limits("u").await.unwrap();
    assert_eq!((me.minute.remaining, me.daily.remaining), (0, 42), "a denial spends nothing of the day");
    fixture.clock.advance(Duration::from_millis(11_999));
    assert!(matches!(fixture.service.admit("u").await.unwrap(), Admission::Denied { .. }));
    fixture.clock.advance(Duration::from_millis(1));
    assert_eq!(remaining(&fixture.service.admit("u").await.unwrap()), 0);
}

#[tokio::test]
async fn a_day_that_is_used_up_is_reported_before_the_minute() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.service.put_tier(Tier::Free, TierLimits::new(5, 8, 2).unwrap()).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(fixture.service.admit("u").await.unwrap(), Admission::Allowed(_)));
    }
    let denied = fixture.service.admit("u").await.unwrap();
    let Admission::Denied { headers, message } = denied else { panic!("{denied:?}") };
    assert_eq!(message, "Daily AI request limit of 2 exceeded. Limit resets in 24 hours.");
    assert_eq!(headers.remaining, 6, "the minute was not spent");
}

#[tokio::test]
async fn a_new_plan_applies_to_the_next_call_and_spending_stays() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    for _ in 0..8 {
        fixture.service.admit("u").await.unwrap();
    }
    fixture.subscribe("u", Plan::ProMonthly).await;
    let admission = fixture.service.admit("u").await.unwrap();
    assert_eq!((remaining(&admission), admission.headers().limit), (31, 30));
    assert!(fixture.service.delete_subscription(&UserId::parse("u").unwrap()).await.unwrap());
    assert!(matches!(fixture.service.admit("u").await.unwrap(), Admission::Denied { .. }));
    assert!(!fixture.service.delete_subscription(&UserId::parse("u").unwrap()).await.unwrap());
}

#[tokio::test]
async fn disabled_limits_allow_every_call() {
    let data = tempfile::tempdir().unwrap();
    let off = "[rate_limit]\nenabled = false";
    let fixture = fixture_with(data.path(), &ManualClock::at(START), off).await;
    fixture.subscribe("u", Plan::ProYearly).await;
    for _ in 0..100 {
        let admission = fixture.service.admit("u").await.unwrap();
        let Admission::Disabled(TierHeaders { limit, remaining, .. }) = admission else {
            panic!("{admission:?}")
        };
        assert_eq!((limit, remaining), (30, 9_223_372_036_854_775_807));
    }
}

#[tokio::test]
async fn spending_and_definitions_survive_a_clean_restart() {
    let data = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let before = fixture_with(data.path(), &clock, "").await;
    before.put("p", bucket(5, 5)).await;
    before.subscribe("u", Plan::StarterYearly).await;
    before.service.put_tier(Tier::Starter, TierLimits::new(10, 12, 100).unwrap()).await.unwrap();
    before.check(&[("p", "k", 3)]).await;
    assert_eq!(remaining(&before.service.admit("u").await.unwrap()), 11);
    before.stop().await;
    clock.advance(Duration::from_secs(12));
    let after = fixture_with(data.path(), &clock, "").await;
    assert_eq!(after.remaining("p", "k").await, 3, "one came back in twelve seconds");
    let me = after.service.user_limits("u").await.unwrap();
    assert_eq!((me.plan, me.minute.remaining, me.daily.remaining), (Plan::StarterYearly, 12, 99));
}

#[tokio::test]
async fn a_check_of_several_keys_spends_all_or_none() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.put("few", bucket(1, 1)).await;
    fixture.put("many", bucket(10, 10)).await;
    let both = [("many", "k", 4), ("few", "k", 1)];
    assert!(fixture.check(&both).await.allowed);
    let denied = fixture.check(&both).await;
    assert!(!denied.allowed);
    assert_eq!([denied.checks[0].allowed, denied.checks[1].allowed], [true, false]);
    assert_eq!(denied.checks[1].retry_after, Some(Duration::from_secs(60)));
    assert_eq!(fixture.remaining("many", "k").await, 6);
    let above = fixture.check(&[("few", "other", 2)]).await;
    assert_eq!((above.allowed, above.checks[0].retry_after), (false, None));
    let unknown = [Check { policy: "many", key: "k", cost: 1 }, Check { policy: "none", key: "k", cost: 1 }];
    let outcome = fixture.service.check(&unknown, CheckOptions::default()).await.unwrap();
    assert_eq!(outcome, CheckOutcome::UnknownPolicy(1));
    assert_eq!(fixture.remaining("many", "k").await, 6);
    let twice = fixture.check(&[("many", "k", 4), ("many", "k", 3)]).await;
    assert!(!twice.allowed, "costs of the same key add up");
}

#[tokio::test]
async fn a_shadow_policy_counts_and_never_denies() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.put("watch", PolicySpec { shadow: true, ..bucket(1, 1) }).await;
    fixture.put("bind", bucket(2, 2)).await;
    for _ in 0..2 {
        assert!(fixture.check(&[("watch", "k", 1), ("bind", "k", 1)]).await.allowed);
    }
    let denied = fixture.check(&[("watch", "other", 1), ("bind", "k", 1)]).await;
    assert!(!denied.allowed && denied.checks[0].allowed && !denied.checks[1].allowed);
    assert_eq!(fixture.remaining("watch", "other").await, 1, "a denial spends nothing, of a shadow either");
    assert_eq!(fixture.remaining("watch", "k").await, 0);
    let shadow = fixture.check(&[("watch", "k", 1)]).await;
    assert!(shadow.allowed && shadow.checks[0].allowed);
    assert_eq!(shadow.checks[0].retry_after, Some(Duration::from_secs(60)), "as if it had denied");
}

#[tokio::test]
async fn a_hold_is_settled_once_and_stays_spent_when_it_expires() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.put("tokens", bucket(100, 100)).await;
    let minute = Duration::from_secs(60);
    let held = fixture.service.hold("tokens", "k", 60, minute).await.unwrap();
    let HoldOutcome::Held { id, limit_state, expires_at } = held else { panic!("{held:?}") };
    assert_eq!((limit_state.remaining, expires_at), (40, START.plus(minute)));
    let settled = fixture.service.settle(id, 25).await.unwrap();
    assert!(matches!(settled, SettleOutcome::Settled { held: 60, cost: 25, .. }), "{settled:?}");
    assert_eq!(fixture.remaining("tokens", "k").await, 75);
    assert_eq!(fixture.service.settle(id, 99).await.unwrap(), settled, "again is the same answer");
    assert_eq!(fixture.remaining("tokens", "k").await, 75);
    let held = fixture.service.hold("tokens", "other", 60, minute).await.unwrap();
    let HoldOutcome::Held { id, .. } = held else { panic!("{held:?}") };
    let debt = fixture.service.hold("tokens", "owing", 60, minute).await.unwrap();
    let HoldOutcome::Held { id: owing, .. } = debt else { panic!("{debt:?}") };
    assert!(matches!(fixture.service.settle(owing, 200).await.unwrap(), SettleOutcome::Settled { .. }));
    let denied = fixture.check(&[("tokens", "owing", 1)]).await;
    assert_eq!(denied.checks[0].retry_after, Some(Duration::from_millis(60_600)), "101 are owed");
    fixture.clock.advance(minute);
    assert_eq!(fixture.service.settle(id, 1).await.unwrap(), SettleOutcome::Expired);
    let denied = fixture.service.hold("tokens", "owing", 1, minute).await.unwrap();
    assert!(matches!(denied, HoldOutcome::Denied { .. }), "{denied:?}");
}

#[tokio::test]
async fn a_refund_stops_at_the_limit_and_a_reset_forgets_all_spending() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.put("p", bucket(5, 5)).await;
    fixture.check(&[("p", "k", 3)]).await;
    assert_eq!(fixture.service.refund("p", "k", 1).await.unwrap().unwrap().remaining, 3);
    assert_eq!(fixture.service.refund("p", "k", 100).await.unwrap().unwrap().remaining, 5);
    fixture.check(&[("p", "k", 5)]).await;
    assert!(fixture.service.reset_key("p", "k").await.unwrap());
    assert_eq!(fixture.remaining("p", "k").await, 5);
    assert_eq!(fixture.service.refund("none", "k", 1).await.unwrap(), None);
}

#[tokio::test]
async fn an_explanation_says_which_limit_decided_how_it_stood_and_when_it_would_allow() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    let window = |kind: &str| PolicyFields {
        kind: Some(kind.to_owned()),
        limit: Some(2),
        window: Some("PT1M".to_owned()),
        ..PolicyFields::default()
    };
    fixture.put("fixed", window("fixed_window").into_spec().unwrap()).await;
    fixture.put("sliding", window("sliding_window").into_spec().unwrap()).await;
    fixture.put("bucket", bucket(2, 5)).await;
    fixture.put("watch", PolicySpec { shadow: true, ..bucket(1, 1) }).await;
    let explain = async |checks: &[(&str, &str, u32)], peek| {
        let checks: Vec<_> = checks.iter().map(|&(policy, key, cost)| Check { policy, key, cost }).collect();
        let options = CheckOptions { peek, explain: true };
        match fixture.service.check(&checks, options).await.unwrap() {
            CheckOutcome::Decided(decision) => decision.explanations.unwrap(),
            CheckOutcome::UnknownPolicy(at) => panic!("the policy at {at} is unknown"),
        }
    };
    let later = "if nothing else is spent until then";
    for (policy, rule, back, retry) in [
        ("fixed", "2 in each window of PT1M", "60.000", "60.000"),
        // The window began 20 s ago. What is spent in it still counts in the next one, less and less.
        ("sliding", "2 in any span of PT1M", "100.000", "70.000"),
        ("bucket", "2 at once and 5 more every PT1M", "24.000", "12.000"),
    ] {
        let asked = [(policy, "k", 1), (policy, "k", 1)];
        let would = format!("Policy {policy} allows {rule}; 2 would fit, 2 of 2 left, nothing is spent.");
        assert_eq!(explain(&asked, true).await, [would.clone(), would], "the same key adds up");
        let spent =
            format!("Policy {policy} allows {rule}; 2 is spent, 0 of 2 left, all of it again in {back} s.");
        assert_eq!(explain(&asked, false).await, [spent.clone(), spent]);
        let denied = format!(
            "Policy {policy} allows {rule}; with 0 of 2 left it has no room for 1 and decided: \
             it would allow that in {retry} s, {later}."
        );
        assert_eq!(explain(&asked[..1], false).await, [denied]);
        let never = format!(
            "Policy {policy} allows {rule}; with 0 of 2 left it has no room for 3 and decided: \
             it never has, the cost is above the limit."
        );
        assert_eq!(explain(&[(policy, "k", 3)], false).await, [never]);
        let none = explain(&[(policy, "k", 0)], false).await;
        assert!(none[0].contains("nothing is asked for, 0 of 2 left, all of it again in"), "{none:?}");
    }
    let both = explain(&[("bucket", "other", 1), ("fixed", "k", 1), ("watch", "w", 2)], false).await;
    assert!(
        both[0].ends_with("; 1 would fit, 2 of 2 left, but policy fixed denied key k: nothing is spent."),
        "{both:?}"
    );
    assert!(both[1].contains("and decided: "), "{both:?}");
    assert!(both[2].ends_with("It only observes, so it denies nothing."), "{both:?}");
    let plain = fixture.check(&[("bucket", "other", 1)]).await;
    assert_eq!(plain.explanations, None);
}

/// Anyone who knows the id of a hold may settle it, so ids must not be predictable.
#[tokio::test]
async fn ids_of_holds_do_not_come_from_a_generator_that_can_be_seeded() {
    let data = tempfile::tempdir().unwrap();
    let fixture = fixture(data.path()).await;
    fixture.put("tokens", bucket(100, 100)).await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        fastrand::seed(7);
        let held = fixture.service.hold("tokens", "k", 1, Duration::from_secs(60)).await.unwrap();
        let HoldOutcome::Held { id, .. } = held else { panic!("{held:?}") };
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1], "the clock stands still, so the ids differ in their random part alone");
}

#[tokio::test]
async fn policies_of_the_file_are_created_and_those_of_operators_stay() {
    let data = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let file = "[policies.edge]\nkind = \"fixed_window\"\nlimit = 3\nwindow = \"PT1M\"\n\
        [policies.edge.match]\ndomain = \"edge\"\n[policies.edge.match.entries]\nremote_address = \"*\"\n\
        [policies.ours]\nkind = \"fixed_window\"\nlimit = 3\nwindow = \"PT1M\"";
    let before = fixture_with(data.path(), &clock, file).await;
    before.put("ours", bucket(7, 7)).await;
    before.stop().await;
    let after = fixture_with(data.path(), &clock, &file.replace("limit = 3", "limit = 4")).await;
    let limit = |name: &str| {
        after.service.policy(name).unwrap().spec.limit.limit_state(&LimitUsage(0, 0, 0), START).limit
    };
    assert_eq!((limit("edge"), limit("ours")), (4, 7));
    let matching = after.service.matching("edge", &[("remote_address", "10.0.0.1")]);
    let [(policy, key)] = &matching[..] else { panic!("{matching:?}") };
    assert_eq!((policy.name.as_str(), key.as_str()), ("edge", "10.0.0.1"));
    assert!(after.service.matching("other", &[("remote_address", "10.0.0.1")]).is_empty());
    let names: Vec<_> = after.service.policies(None, 10).iter().map(|p| p.name().to_string()).collect();
    assert_eq!(names, ["edge", "ours"]);
    assert!(after.service.delete_policy(&PolicyName::parse("edge").unwrap()).await.unwrap());
    assert!(after.service.policy("edge").is_none());
}
