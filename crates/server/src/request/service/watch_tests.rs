//! Tests of waiting for a change of a request, on an engine that only this process changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::state::RequestStatus;
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId};
use weir_store::request::{SubmitOutcome, TenantCapacity};

use super::*;
use crate::settings::source::Sources;

const WAIT: Duration = Duration::from_secs(20);

struct ServiceFixture {
    service: RequestService,
    engines: Engines,
    settings: Settings,
    id: RequestId,
    _data: tempfile::TempDir,
}

/// A service on the embedded engine with one request and no worker.
async fn fixture() -> ServiceFixture {
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
        trace: None,
    };
    let SubmitOutcome::Accepted(receipt) = service.submit(submission).await.unwrap() else {
        panic!("it is accepted")
    };
    ServiceFixture { service, engines, settings, id: receipt.id, _data: data }
}

fn tenant() -> TenantId {
    TenantId::parse("acme").unwrap()
}

impl ServiceFixture {
    /// Changes the request as a worker would, without publishing the change.
    async fn begin(&self) {
        let policy = &self.settings.request.policy;
        let claimed = self
            .engines
            .requests()
            .claim_named(&[self.id], &TenantCapacity::default(), policy)
            .await
            .unwrap();
        assert_eq!(claimed.jobs.len(), 1);
    }

    /// Waits for a change of the request; returns its status and how long that took. The clock advances only while all tasks
    /// wait.
    async fn wait(&self) -> (Option<RequestStatus>, Duration) {
        let mut subscription = self.service.hub().subscribe(self.id, &tenant()).unwrap();
        tokio::time::pause();
        let begun = Instant::now();
        let closing = CancellationToken::new();
        let changed = self
            .service
            .next_change(&mut subscription, RequestStatus::Accepted, begun + WAIT, &closing)
            .await;
        (changed.unwrap().map(|request| request.status), begun.elapsed())
    }
}

#[tokio::test]
async fn a_store_with_a_single_server_is_not_polled() {
    let fixture = fixture().await;
    fixture.begin().await;
    // The change was not published, so only the read at the deadline finds it.
    let (status, waited) = fixture.wait().await;
    assert_eq!(status, Some(RequestStatus::InProgress));
    assert!(waited >= WAIT, "{waited:?}");
}

#[tokio::test]
async fn a_published_change_ends_the_wait_at_once() {
    let fixture = fixture().await;
    fixture.begin().await;
    let hub = Arc::clone(fixture.service.hub());
    let waited = tokio::join!(fixture.wait(), async { hub.publish(fixture.id, RequestStatus::InProgress) });
    assert_eq!(waited.0, (Some(RequestStatus::InProgress), Duration::ZERO));
}

#[tokio::test]
async fn a_change_is_found_although_an_earlier_one_is_published_after_it() {
    let fixture = fixture().await;
    fixture.begin().await;
    let hub = Arc::clone(fixture.service.hub());
    // A slower task publishes the earlier status.
    let waited = tokio::join!(fixture.wait(), async {
        hub.publish(fixture.id, RequestStatus::InProgress);
        hub.publish(fixture.id, RequestStatus::Accepted);
    });
    assert_eq!(waited.0, (Some(RequestStatus::InProgress), Duration::ZERO));
}
