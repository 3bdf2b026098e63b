//! Dead letters of request for the operator: requests whose attempts all failed.

use std::sync::Arc;

use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_store::Result;
use weir_store::request::{DeadRequest, Request, RequestStore};

use super::RequestService;
use super::hub::StatusHub;
use crate::engines::within;
use crate::redact::redact;
use crate::request::encryption::{SEALING_BYTES, SealedField};
use crate::request::events::{DeadPayloadUnreadable, RequestReplayed};

/// Dead letters replayed in one commit.
const REPLAY_BATCH: usize = 500;
/// Shown in place of a payload that cannot be decrypted.
const UNREADABLE: &str = "(encrypted with a key that this server does not have)";

impl RequestService {
    /// Dead letters in order of id, starting after `after`. Payloads of more than `payload_max` bytes are left out.
    pub async fn dead_letters(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>> {
        let sealed_max = payload_max.saturating_add(SEALING_BYTES);
        within(self.timeout, self.store.dead_requests(after, limit, sealed_max)).await
    }

    pub async fn dead_letter(&self, id: RequestId) -> Result<Option<DeadRequest>> {
        // The list starts after an id, so it is asked for one entry after the preceding id.
        let before = id.as_uuid().as_u128().checked_sub(1).map(uuid::Uuid::from_u128);
        let found = self.dead_letters(before.map(RequestId::from_uuid), 1, usize::MAX).await?;
        Ok(found.into_iter().find(|dead| dead.request.id == id))
    }

    /// Restarts a dead request; returns false if it is not dead.
    pub async fn replay(&self, id: RequestId) -> Result<bool> {
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let replay = async move {
            let replayed = store.replay_request(id).await?;
            if replayed {
                publish_replays(store.as_ref(), &hub, &[id]).await;
            }
            Ok(replayed)
        };
        self.change(replay).await
    }

    /// Restarts all requests that are dead now, and returns how many were restarted.
    /// Fails when the store does not answer; requests restarted before that stay so.
    pub async fn replay_all(&self) -> Result<u64> {
        let dead = within(self.timeout, self.store.count_dead_requests()).await?;
        let mut replayed = 0;
        // No more than were dead at the start: requests that die again meanwhile would make this endless.
        while replayed < dead {
            let batch = REPLAY_BATCH.min(usize::try_from(dead - replayed).unwrap_or(REPLAY_BATCH));
            let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
            let replay = async move {
                let ids = store.replay_requests(batch).await?;
                publish_replays(store.as_ref(), &hub, &ids).await;
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

    /// Removes a dead letter from the list; the request stays failed. Returns false if it is not dead.
    pub async fn discard(&self, id: RequestId) -> Result<bool> {
        within(self.timeout, self.store.discard_request(id)).await
    }

    /// The payload with sensitive fields redacted, or `None` if the list left it out.
    #[must_use]
    pub fn redacted_payload(&self, request: &Request) -> Option<String> {
        // Sealed bytes are never empty: they have a nonce and a tag.
        if request.payload.bytes.is_empty() {
            return None;
        }
        Some(match self.keys.open(request.id, SealedField::Payload, &request.payload) {
            Ok(payload) => redact(&payload, &self.settings.sensitive_fields),
            Err(error) => {
                DeadPayloadUnreadable { id: request.id, error: &error }.emit();
                UNREADABLE.to_owned()
            }
        })
    }
}

/// Publishes and logs replays. The records are read for the log lines alone.
async fn publish_replays(store: &dyn RequestStore, hub: &StatusHub, ids: &[RequestId]) {
    ids.iter().for_each(|id| hub.publish(*id, RequestStatus::Accepted));
    let found = store.find_summaries(ids).await.unwrap_or_default();
    for id in ids {
        let request = found.iter().find(|request| request.id == *id);
        RequestReplayed { id: *id, request }.emit();
    }
}
