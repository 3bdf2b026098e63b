//! Requests whose attempts were all in vain, for the operator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_store::Result;
use weir_store::request::{DeadRequest, Request};

use super::RequestService;
use super::hub::StatusHub;
use crate::engines::within;
use crate::redact::redact;
use crate::request::encryption::{SEALING_BYTES, SealedField};

/// Dead letters replayed in one commit.
const REPLAY_BATCH: usize = 500;
/// How long a count of dead letters is good for.
const COUNTED_FOR: Duration = Duration::from_secs(5);

/// How long a count may hold up whoever wants to read metrics.
const COUNT_PATIENCE: Duration = Duration::from_millis(500);

/// What is shown of a payload that cannot be opened.
const UNREADABLE: &str = "(sealed with a key that this server does not have)";

impl RequestService {
    /// Dead letters in order of id, after the one named `after`. Payloads of more than `payload_max` bytes are left out.
    pub async fn dead_letters(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>> {
        let sealed_max = payload_max.saturating_add(SEALING_BYTES);
        within(self.timeout, self.store.dead_requests(after, limit, sealed_max)).await
    }

    /// One dead letter.
    pub async fn dead_letter(&self, id: RequestId) -> Result<Option<DeadRequest>> {
        // The first one after the id before it, if that is it.
        let before = id.as_uuid().as_u128().checked_sub(1).map(uuid::Uuid::from_u128);
        let found = self.dead_letters(before.map(RequestId::from_uuid), 1, usize::MAX).await?;
        Ok(found.into_iter().find(|dead| dead.request.id == id))
    }

    /// Lets a dead letter start again; false when it is none.
    pub async fn replay(&self, id: RequestId) -> Result<bool> {
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let replay = async move {
            let replayed = store.replay_request(id).await?;
            if replayed {
                restarted(&hub, id);
            }
            Ok(replayed)
        };
        self.change(replay).await
    }

    /// Lets every dead letter start again that is there now, and says how many did.
    /// Fails when the store does not answer; what was replayed before stays replayed.
    pub async fn replay_all(&self) -> Result<u64> {
        let there = within(self.timeout, self.store.count_dead_requests()).await?;
        let mut replayed = 0;
        // Those that die again meanwhile are left alone, or this might never end.
        while replayed < there {
            let batch = REPLAY_BATCH.min(usize::try_from(there - replayed).unwrap_or(REPLAY_BATCH));
            let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
            let replay = async move {
                let ids = store.replay_requests(batch).await?;
                ids.iter().for_each(|id| restarted(&hub, *id));
                Ok(ids.len())
            };
            let count = self.change(replay).await?;
            if count == 0 {
                break;
            }
            replayed += count as u64;
        }
        Ok(replayed)
    }

    /// Takes a dead letter off the list; the request stays failed. False when it is none.
    pub async fn discard(&self, id: RequestId) -> Result<bool> {
        within(self.timeout, self.store.discard_request(id)).await
    }

    /// What a request asks for, without the fields that are sensitive; none if the payload was left out.
    #[must_use]
    pub fn shown_payload(&self, request: &Request) -> Option<String> {
        // What is sealed has a nonce and a tag at least.
        if request.payload.bytes.is_empty() {
            return None;
        }
        Some(match self.keys.open(request.id, SealedField::Payload, &request.payload) {
            Ok(payload) => redact(&payload, &self.settings.sensitive_fields),
            Err(error) => {
                tracing::warn!(requestId = %request.id, %error, "a payload does not open");
                UNREADABLE.to_owned()
            }
        })
    }

    /// Brings the gauge of dead letters up to date, if it is not. A store that does not answer leaves it as it is.
    pub async fn measure_dead_letters(&self) {
        let mut counted = self.dead_counted.lock().await;
        if counted.is_some_and(|at| at.elapsed() < COUNTED_FOR) {
            return;
        }
        if let Ok(count) = within(COUNT_PATIENCE, self.store.count_dead_requests()).await {
            self.metrics.dlq_depth.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        *counted = Some(Instant::now());
    }
}

fn restarted(hub: &StatusHub, id: RequestId) {
    tracing::info!(requestId = %id, statusTransition = "FAILED_RETRY_EXHAUSTED->ACCEPTED", "request replayed");
    hub.changed(id, RequestStatus::Accepted);
}
