use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{LimitUsage, Plan, Tier, TierHeaders, TierLimits};
use weir_core::{ManualClock, PolicyName, Timestamp, UserId};
use weir_store::tier::PolicySpec;

use super::limits::Decided;
use super::*;
use crate::settings::source::{Sources, flatten_toml};
use crate::tier::settings::policy_input::Fields;

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);

/// The service on the embedded engine, on a clock that stands still.
struct Given {
    service: TierService,
    clock: ManualClock,
    _engines: Engines,
}

async fn given_with(data: &Path, clock: &ManualClock, file: &str) -> Given {
    let path = Path::new("weir.toml");
    let environment = BTreeMap::from([("WEIR_DATA".to_owned(), data.display().to_string())]);
    let file = Some((path.to_owned(), flatten_toml(path, file).unwrap()));
    let settings = Settings::read(Sources { environment, file, ..Sources::default() }).unwrap();
    let engines = Engines::open(&settings, Some(Arc::new(clock.clone()))).await.unwrap();
    let service = TierService::start(&engines, &settings, &Metrics::default());
    service.load().await.unwrap();
    Given { service, clock: clock.clone(), _engines: engines }
}

async fn given(data: &Path) -> Given {
    given_with(data, &ManualClock::at(START), "").await
}

fn bucket(capacity: i128, refill: i128) -> PolicySpec {
    let fields = Fields {
        kind: Some("token_bucket".to_owned()),
        capacity: Some(capacity),
        refill: Some(refill),
        period: Some("PT1M".to_owned()),
        ..Fields::default()
    };
    fields.into_spec().unwrap()
}

impl Given {
    async fn stop(self) {
        self.service.drain().await;
    }

    async fn put(&self, name: &str, spec: PolicySpec) {
        let name = PolicyName::parse(name).unwrap();
        self.service.put_policy(&name, &spec).await.unwrap().unwrap();
    }

    async fn check(&self, checks: &[(&str, &str, u32)]) -> Decided {
        let checks: Vec<_> = checks.iter().map(|&(policy, key, cost)| Check { policy, key, cost }).collect();
        match self.service.check(&checks, false).await.unwrap() {
            CheckOutcome::Decided(decided) => decided,
            CheckOutcome::UnknownPolicy(at) => panic!("the policy at {at} is unknown"),
        }
    }

    async fn remaining(&self, policy: &str, key: &str) -> u32 {
        self.check(&[(policy, key, 0)]).await.checks[0].limit_state.remaining
    }

    async fn subscribe(&self, user: &str, plan: Plan) {
        self.service.put_subscription(&UserId::parse(user).unwrap(), plan).await.unwrap();
    }
}

fn remaining(admission: &Admission) -> u64 {
    assert!(matches!(admission, Admission::Allowed(_)), "{admission:?}");
    admission.headers().remaining
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_200_parallel_calls_of_a_free_user_exactly_8_pass() {
    let data = tempfile::tempdir().unwrap();
    let given = Arc::new(given(data.path()).await);
    let calls: Vec<_> = (0..200)
        .map(|_| {
            let given = Arc::clone(&given);
            tokio::spawn(async move { given.service.admit("u").await.unwrap() })
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
    let given = given(data.path()).await;
    for left in (0..8).rev() {
        assert_eq!(remaining(&given.service.admit("u").await.unwrap()), left);
    }
    let denied = given.service.admit("u").await.unwrap();
    let Admission::Denied { headers, message } = &denied else { panic!("{denied:?}") };
    assert_eq!(message, "Rate limit exceeded. Maximum 5 AI requests per minute. Please try again shortly.");
    assert_eq!((headers.limit, headers.remaining, headers.retry_after_s), (5, 0, Some(12)));
    let me = given.service.limits_me("u").await.unwrap();
    assert_eq!((me.minute.remaining, me.daily.remaining), (0, 42), "a denial spends nothing of the day");
    given.clock.advance(Duration::from_millis(11_999));
    assert!(matches!(given.service.admit("u").await.unwrap(), Admission::Denied { .. }));
    given.clock.advance(Duration::from_millis(1));
    assert_eq!(remaining(&given.service.admit("u").await.unwrap()), 0);
}

#[tokio::test]
async fn a_day_that_is_used_up_is_told_first() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.service.put_tier(Tier::Free, TierLimits::new(5, 8, 2).unwrap()).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(given.service.admit("u").await.unwrap(), Admission::Allowed(_)));
    }
    let denied = given.service.admit("u").await.unwrap();
    let Admission::Denied { headers, message } = denied else { panic!("{denied:?}") };
    assert_eq!(message, "Daily AI request limit of 2 exceeded. Limit resets in 24 hours.");
    assert_eq!(headers.remaining, 6, "the minute was not spent");
}

#[tokio::test]
async fn a_new_plan_holds_for_the_next_call_and_what_was_spent_stays_spent() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    for _ in 0..8 {
        given.service.admit("u").await.unwrap();
    }
    given.subscribe("u", Plan::ProMonthly).await;
    let admission = given.service.admit("u").await.unwrap();
    assert_eq!((remaining(&admission), admission.headers().limit), (31, 30));
    assert!(given.service.delete_subscription(&UserId::parse("u").unwrap()).await.unwrap());
    assert!(matches!(given.service.admit("u").await.unwrap(), Admission::Denied { .. }));
    assert!(!given.service.delete_subscription(&UserId::parse("u").unwrap()).await.unwrap());
}

#[tokio::test]
async fn limits_that_are_switched_off_let_everything_through() {
    let data = tempfile::tempdir().unwrap();
    let off = "[rate_limit]\nenabled = false";
    let given = given_with(data.path(), &ManualClock::at(START), off).await;
    given.subscribe("u", Plan::ProYearly).await;
    for _ in 0..100 {
        let admission = given.service.admit("u").await.unwrap();
        let Admission::Disabled(TierHeaders { limit, remaining, .. }) = admission else {
            panic!("{admission:?}")
        };
        assert_eq!((limit, remaining), (30, 9_223_372_036_854_775_807));
    }
}

#[tokio::test]
async fn what_was_spent_and_set_survives_a_clean_restart() {
    let data = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let before = given_with(data.path(), &clock, "").await;
    before.put("p", bucket(5, 5)).await;
    before.subscribe("u", Plan::StarterYearly).await;
    before.service.put_tier(Tier::Starter, TierLimits::new(10, 12, 100).unwrap()).await.unwrap();
    before.check(&[("p", "k", 3)]).await;
    assert_eq!(remaining(&before.service.admit("u").await.unwrap()), 11);
    before.stop().await;
    clock.advance(Duration::from_secs(12));
    let after = given_with(data.path(), &clock, "").await;
    assert_eq!(after.remaining("p", "k").await, 3, "one came back in twelve seconds");
    let me = after.service.limits_me("u").await.unwrap();
    assert_eq!((me.plan, me.minute.remaining, me.daily.remaining), (Plan::StarterYearly, 12, 99));
}

#[tokio::test]
async fn a_check_of_several_keys_spends_all_or_none() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.put("few", bucket(1, 1)).await;
    given.put("many", bucket(10, 10)).await;
    let both = [("many", "k", 4), ("few", "k", 1)];
    assert!(given.check(&both).await.allowed);
    let denied = given.check(&both).await;
    assert!(!denied.allowed);
    assert_eq!([denied.checks[0].allowed, denied.checks[1].allowed], [true, false]);
    assert_eq!(denied.checks[1].retry_after, Some(Duration::from_secs(60)));
    assert_eq!(given.remaining("many", "k").await, 6);
    let above = given.check(&[("few", "other", 2)]).await;
    assert_eq!((above.allowed, above.checks[0].retry_after), (false, None));
    let unknown = [Check { policy: "many", key: "k", cost: 1 }, Check { policy: "none", key: "k", cost: 1 }];
    let outcome = given.service.check(&unknown, false).await.unwrap();
    assert_eq!(outcome, CheckOutcome::UnknownPolicy(1));
    assert_eq!(given.remaining("many", "k").await, 6);
    let twice = given.check(&[("many", "k", 4), ("many", "k", 3)]).await;
    assert!(!twice.allowed, "costs of the same key add up");
}

#[tokio::test]
async fn a_shadow_observes_and_never_denies() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.put("watch", PolicySpec { shadow: true, ..bucket(1, 1) }).await;
    given.put("bind", bucket(2, 2)).await;
    for _ in 0..2 {
        assert!(given.check(&[("watch", "k", 1), ("bind", "k", 1)]).await.allowed);
    }
    let denied = given.check(&[("watch", "other", 1), ("bind", "k", 1)]).await;
    assert!(!denied.allowed && denied.checks[0].allowed && !denied.checks[1].allowed);
    assert_eq!(given.remaining("watch", "other").await, 1, "a denial spends nothing, of a shadow either");
    assert_eq!(given.remaining("watch", "k").await, 0);
    let alone = given.check(&[("watch", "k", 1)]).await;
    assert!(alone.allowed && alone.checks[0].allowed);
    assert_eq!(
        alone.checks[0].retry_after,
        Some(Duration::from_secs(60)),
        "it tells what it would have said"
    );
}

#[tokio::test]
async fn a_hold_is_settled_once_and_expires_spent() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.put("tokens", bucket(100, 100)).await;
    let minute = Duration::from_secs(60);
    let held = given.service.hold("tokens", "k", 60, minute).await.unwrap();
    let HoldOutcome::Held { id, limit_state, expires_at } = held else { panic!("{held:?}") };
    assert_eq!((limit_state.remaining, expires_at), (40, START.plus(minute)));
    let settled = given.service.settle(id, 25).await.unwrap();
    assert!(matches!(settled, SettleOutcome::Settled { held: 60, cost: 25, .. }), "{settled:?}");
    assert_eq!(given.remaining("tokens", "k").await, 75);
    assert_eq!(given.service.settle(id, 99).await.unwrap(), settled, "again is the same answer");
    assert_eq!(given.remaining("tokens", "k").await, 75);
    let held = given.service.hold("tokens", "other", 60, minute).await.unwrap();
    let HoldOutcome::Held { id, .. } = held else { panic!("{held:?}") };
    let debt = given.service.hold("tokens", "owing", 60, minute).await.unwrap();
    let HoldOutcome::Held { id: owing, .. } = debt else { panic!("{debt:?}") };
    assert!(matches!(given.service.settle(owing, 200).await.unwrap(), SettleOutcome::Settled { .. }));
    let denied = given.check(&[("tokens", "owing", 1)]).await;
    assert_eq!(denied.checks[0].retry_after, Some(Duration::from_millis(60_600)), "101 are owed");
    given.clock.advance(minute);
    assert_eq!(given.service.settle(id, 1).await.unwrap(), SettleOutcome::Expired);
    let denied = given.service.hold("tokens", "owing", 1, minute).await.unwrap();
    assert!(matches!(denied, HoldOutcome::Denied { .. }), "{denied:?}");
}

#[tokio::test]
async fn a_refund_never_fills_past_full_and_a_reset_key_is_as_good_as_new() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.put("p", bucket(5, 5)).await;
    given.check(&[("p", "k", 3)]).await;
    assert_eq!(given.service.refund("p", "k", 1).await.unwrap().unwrap().remaining, 3);
    assert_eq!(given.service.refund("p", "k", 100).await.unwrap().unwrap().remaining, 5);
    given.check(&[("p", "k", 5)]).await;
    assert!(given.service.reset_key("p", "k").await.unwrap());
    assert_eq!(given.remaining("p", "k").await, 5);
    assert_eq!(given.service.refund("none", "k", 1).await.unwrap(), None);
}

/// Whoever knows the id of a hold may settle it, so nothing that a caller can see or guess may lead to one.
#[tokio::test]
async fn ids_of_holds_do_not_come_from_a_generator_that_can_be_seeded() {
    let data = tempfile::tempdir().unwrap();
    let given = given(data.path()).await;
    given.put("tokens", bucket(100, 100)).await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        fastrand::seed(7);
        let held = given.service.hold("tokens", "k", 1, Duration::from_secs(60)).await.unwrap();
        let HoldOutcome::Held { id, .. } = held else { panic!("{held:?}") };
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1], "the clock stands still, so the ids differ in their random part alone");
}

#[tokio::test]
async fn policies_of_the_file_are_made_and_those_of_operators_left_alone() {
    let data = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let file = "[policies.edge]\nkind = \"fixed_window\"\nlimit = 3\nwindow = \"PT1M\"\n\
        [policies.edge.match]\ndomain = \"edge\"\n[policies.edge.match.entries]\nremote_address = \"*\"\n\
        [policies.mine]\nkind = \"fixed_window\"\nlimit = 3\nwindow = \"PT1M\"";
    let before = given_with(data.path(), &clock, file).await;
    before.put("mine", bucket(7, 7)).await;
    before.stop().await;
    let after = given_with(data.path(), &clock, &file.replace("limit = 3", "limit = 4")).await;
    let limit = |name: &str| {
        after.service.policy(name).unwrap().spec.limit.limit_state(&LimitUsage(0, 0, 0), START).limit
    };
    assert_eq!((limit("edge"), limit("mine")), (4, 7));
    let matching = after.service.matching("edge", &[("remote_address", "10.0.0.1")]);
    let [(policy, key)] = &matching[..] else { panic!("{matching:?}") };
    assert_eq!((policy.name.as_str(), key.as_str()), ("edge", "10.0.0.1"));
    assert!(after.service.matching("other", &[("remote_address", "10.0.0.1")]).is_empty());
    let names: Vec<_> = after.service.policies(None, 10).iter().map(|p| p.name.to_string()).collect();
    assert_eq!(names, ["edge", "mine"]);
    assert!(after.service.delete_policy(&PolicyName::parse("edge").unwrap()).await.unwrap());
    assert!(after.service.policy("edge").is_none());
}
