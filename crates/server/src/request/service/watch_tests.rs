//! Waiting for a change of a request on an engine that this process alone changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::state::RequestStatus;
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId};
use weir_store::request::SubmitOutcome;

use super::*;
use crate::settings::source::Sources;

const WAIT: Duration = Duration::from_secs(20);

struct Given {
    service: RequestService,
    engines: Engines,
    settings: Settings,
    id: RequestId,
    _data: tempfile::TempDir,
}

/// A service on the embedded engine with one request, and nobody who works on it.
async fn given() -> Given {
    let data = tempfile::tempdir().unwrap();
    let environment = BTreeMap::from([("WEIR_DATA".to_owned(), data.path().display().to_string())]);
    let settings = Settings::read(Sources { environment, ..Sources::default() }).unwrap();
    let engines = Engines::open(&settings, None).await.unwrap();
    let keys = Arc::new(Keyring::load(&settings.request, data.path()).unwrap());
    let service = RequestService::start(&engines, &settings, keys, &Metrics::default());
    let submission = Submission {
        tenant: tenant(),
        key: IdempotencyKey::parse("k").unwrap(),
        request_type: RequestType::parse("pay").unwrap(),
        payload: Bytes::from_static(b"1"),
        fingerprint: Fingerprint::from_bytes([7; 32]),
        callback_url: None,
    };
    let SubmitOutcome::Accepted(receipt) = service.submit(submission).await.unwrap() else {
        panic!("it is accepted")
    };
    Given { service, engines, settings, id: receipt.id, _data: data }
}

fn tenant() -> TenantId {
    TenantId::parse("acme").unwrap()
}

impl Given {
    /// Changes the request as a worker would, without a word to anybody.
    async fn begin(&self) {
        let policy = &self.settings.request.policy;
        let claimed = self.engines.requests().claim_named(&[self.id], policy).await.unwrap();
        assert_eq!(claimed.jobs.len(), 1);
    }

    /// Waits for a change of the request; says what it found and how long that took, by a clock that only runs while
    /// everybody waits.
    async fn wait(&self) -> (Option<RequestStatus>, Duration) {
        let mut waiting = self.service.hub().subscribe(self.id, &tenant()).unwrap();
        tokio::time::pause();
        let begun = Instant::now();
        let closing = CancellationToken::new();
        let changed =
            self.service.next_change(&mut waiting, RequestStatus::Accepted, begun + WAIT, &closing).await;
        (changed.unwrap().map(|request| request.status), begun.elapsed())
    }
}

#[tokio::test]
async fn whoever_waits_does_not_ask_a_store_that_nobody_else_changes() {
    let given = given().await;
    given.begin().await;
    // The change was told to nobody, so it is seen by the last look, and by none before.
    let (status, waited) = given.wait().await;
    assert_eq!(status, Some(RequestStatus::InProgress));
    assert!(waited >= WAIT, "{waited:?}");
}

#[tokio::test]
async fn whoever_waits_is_told_of_a_change_at_once() {
    let given = given().await;
    given.begin().await;
    let hub = Arc::clone(given.service.hub());
    let told = tokio::join!(given.wait(), async { hub.changed(given.id, RequestStatus::InProgress) });
    assert_eq!(told.0, (Some(RequestStatus::InProgress), Duration::ZERO));
}

#[tokio::test]
async fn a_change_is_seen_although_an_earlier_one_is_told_after_it() {
    let given = given().await;
    given.begin().await;
    let hub = Arc::clone(given.service.hub());
    // Somebody who was slower tells how the request stood before.
    let told = tokio::join!(given.wait(), async {
        hub.changed(given.id, RequestStatus::InProgress);
        hub.changed(given.id, RequestStatus::Accepted);
    });
    assert_eq!(told.0, (Some(RequestStatus::InProgress), Duration::ZERO));
}
