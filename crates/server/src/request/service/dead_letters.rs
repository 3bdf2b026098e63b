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

/// Dead letters read together, and replayed in one commit.
const SCAN_PAGE: usize = 500;
/// The most dead letters that are scanned for one page of a filtered list: nothing of what they are filtered by has an index.
const SCAN_MAX: usize = 10_000;
/// Shown in place of a payload that cannot be decrypted.
const UNREADABLE: &str = "(encrypted with a key that this server does not have)";

/// Dead letters that match a filter.
#[derive(Debug)]
pub struct DeadScan {
    pub letters: Vec<DeadRequest>,
    /// Where the next scan continues, unless this one has reached the end.
    pub stopped_at: Option<RequestId>,
}

/// How many dead letters matched a filter, and how many of them were restarted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    pub matched: u64,
    pub replayed: u64,
}

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

    /// Scans dead letters in order of id, starting after `after`, for up to `limit` that match. Scans [`SCAN_MAX`] at most.
    pub async fn scan_dead(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
        matches: &(dyn Fn(&DeadRequest) -> bool + Sync),
    ) -> Result<DeadScan> {
        let mut scan = DeadScan { letters: Vec::new(), stopped_at: None };
        let (mut after, mut scanned) = (after, 0);
        loop {
            let page = self.dead_letters(after, SCAN_PAGE, payload_max).await?;
            let is_last = page.len() < SCAN_PAGE;
            for letter in page {
                (after, scanned) = (Some(letter.request.id), scanned + 1);
                if matches(&letter) {
                    scan.letters.push(letter);
                }
                if scan.letters.len() >= limit {
                    scan.stopped_at = after;
                    return Ok(scan);
                }
            }
            if is_last {
                return Ok(scan);
            }
            if scanned >= SCAN_MAX {
                scan.stopped_at = after;
                return Ok(scan);
            }
        }
    }

    /// Restarts the dead requests that match, or with `dry_run` only counts them.
    /// Fails when the store does not answer; requests restarted before that stay so.
    pub async fn replay_matching(
        &self,
        dry_run: bool,
        matches: &(dyn Fn(&DeadRequest) -> bool + Sync),
    ) -> Result<ReplayCounts> {
        // No more than were dead at the start: requests that die meanwhile would make this endless.
        let mut left = within(self.timeout, self.store.count_dead_requests()).await?;
        let (mut counts, mut after) = (ReplayCounts::default(), None);
        while left > 0 {
            let page = within(self.timeout, self.store.dead_requests(after, SCAN_PAGE, 0)).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.request.id);
            left = left.saturating_sub(page.len() as u64);
            let ids: Vec<RequestId> =
                page.iter().filter(|dead| matches(dead)).map(|dead| dead.request.id).collect();
            counts.matched += ids.len() as u64;
            if !dry_run && !ids.is_empty() {
                counts.replayed += self.replay(ids).await?;
            }
        }
        Ok(counts)
    }

    /// Restarts those of these requests that are dead, and returns how many were.
    pub async fn replay(&self, ids: Vec<RequestId>) -> Result<u64> {
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let replay = async move {
            let replayed = store.replay_requests(&ids).await?;
            publish_replays(store.as_ref(), &hub, &replayed).await;
            Ok(replayed.len() as u64)
        };
        self.change(replay).await
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
