//! Compares the idempotency rule with a model that stores every submission and searches for the first one whose key
//! has not expired.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use weir_core::request::canonical::{CanonicalJson, Fingerprint};
use weir_core::request::idempotency::{IdempotencyRecord, RETENTION, SubmissionDecision, TenantKey, decide};
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId, Timestamp};

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);

fn tenant_key(tenant: u8, key: u8) -> TenantKey {
    TenantKey {
        tenant: TenantId::parse(format!("tenant-{tenant}")).unwrap(),
        key: IdempotencyKey::parse(format!("key-{key}")).unwrap(),
    }
}

fn fingerprint(kind: u8, payload: u8) -> Fingerprint {
    let payload = CanonicalJson::parse(payload.to_string().as_bytes()).unwrap();
    Fingerprint::new(&RequestType::parse(format!("type-{kind}")).unwrap(), &payload)
}

#[test]
fn a_key_is_free_again_after_exactly_a_day() {
    let record = IdempotencyRecord::new(fingerprint(0, 0), RequestId::new(START, [0; 10]), START);
    let last = Timestamp::from_micros(START.plus(RETENTION).as_micros() - 1);
    assert_eq!(RETENTION, Duration::from_secs(24 * 60 * 60));
    assert_eq!(
        decide(Some(&record), &fingerprint(0, 0), last),
        SubmissionDecision::Replay(record.request_id)
    );
    assert_eq!(decide(Some(&record), &fingerprint(0, 1), last), SubmissionDecision::Conflict);
    assert_eq!(decide(Some(&record), &fingerprint(0, 1), START.plus(RETENTION)), SubmissionDecision::New);
    assert_eq!(decide(None, &fingerprint(0, 0), START), SubmissionDecision::New);
}

/// An accepted submission: its content and the request it became.
struct AcceptedSubmission {
    tenant: u8,
    key: u8,
    content: (u8, u8),
    at: Timestamp,
    id: RequestId,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn decisions_match_the_model(
        sent in prop::collection::vec((0_u8..2, 0_u8..2, 0_u8..2, 0_u8..2, 0_u64..30), 1..60),
    ) {
        let (mut now, mut records, mut model) = (START, BTreeMap::new(), Vec::<AcceptedSubmission>::new());
        for (index, (tenant, key, kind, payload, hours)) in sent.into_iter().enumerate() {
            now = now.plus(Duration::from_secs(hours * 3_600));
            let existing = model.iter().find(|accepted| {
                (accepted.tenant, accepted.key) == (tenant, key) && now.since(accepted.at) < Duration::from_secs(86_400)
            });
            let expected = match existing {
                None => SubmissionDecision::New,
                Some(accepted) if accepted.content == (kind, payload) => SubmissionDecision::Replay(accepted.id),
                Some(_) => SubmissionDecision::Conflict,
            };
            let name = tenant_key(tenant, key);
            let submission = decide(records.get(&name), &fingerprint(kind, payload), now);
            prop_assert_eq!(submission, expected);
            if submission == SubmissionDecision::New {
                let id = RequestId::new(now, [u8::try_from(index).unwrap(); 10]);
                records.insert(name, IdempotencyRecord::new(fingerprint(kind, payload), id, now));
                model.push(AcceptedSubmission { tenant, key, content: (kind, payload), at: now, id });
            }
        }
    }
}
