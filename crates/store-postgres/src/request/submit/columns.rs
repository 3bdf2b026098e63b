//! Submissions as the arrays that a statement takes.

use tokio_postgres::types::ToSql;
use uuid::Uuid;
use weir_store::request::NewRequest;

/// In the order of `unnest` in the statements that insert.
pub(super) struct Columns<'a> {
    ids: Vec<Uuid>,
    tenants: Vec<&'a str>,
    keys: Vec<&'a str>,
    hashes: Vec<&'a [u8]>,
    types: Vec<&'a str>,
    statuses: Vec<&'static str>,
    payloads: Vec<&'a [u8]>,
    key_ids: Vec<&'a str>,
    callbacks: Vec<Option<&'a str>>,
    downstreams: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    pub(super) fn of(accepted: &[NewRequest<'a>]) -> Self {
        let batch = || accepted.iter().map(|new| new.submit);
        Self {
            ids: batch().map(|submit| *submit.id.as_uuid()).collect(),
            tenants: batch().map(|submit| submit.tenant.as_str()).collect(),
            keys: batch().map(|submit| submit.key.as_str()).collect(),
            hashes: batch().map(|submit| submit.fingerprint.as_bytes().as_slice()).collect(),
            types: batch().map(|submit| submit.request_type.as_str()).collect(),
            statuses: accepted.iter().map(|new| new.progress.status.as_str()).collect(),
            payloads: batch().map(|submit| submit.payload.bytes.as_slice()).collect(),
            key_ids: batch().map(|submit| submit.payload.key_id.as_str()).collect(),
            callbacks: batch().map(|submit| submit.callback_url.as_deref()).collect(),
            downstreams: batch().map(|submit| submit.downstream.as_str()).collect(),
        }
    }

    /// These, and what follows them.
    pub(super) fn and<'v, const N: usize>(
        &'v self,
        rest: [&'v (dyn ToSql + Sync); N],
    ) -> Vec<&'v (dyn ToSql + Sync)> {
        let own: [&(dyn ToSql + Sync); 10] = [
            &self.ids,
            &self.tenants,
            &self.keys,
            &self.hashes,
            &self.types,
            &self.statuses,
            &self.payloads,
            &self.key_ids,
            &self.callbacks,
            &self.downstreams,
        ];
        own.into_iter().chain(rest).collect()
    }
}
