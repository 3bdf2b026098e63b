//! Submissions as the arrays that a statement takes.

use tokio_postgres::types::ToSql;
use uuid::Uuid;
use weir_core::request::state::Status;
use weir_store::Result;
use weir_store::request::Submit;

use super::first_status;

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
    pub(super) fn of(batch: &[&'a Submit]) -> Result<Self> {
        let statuses = batch.iter().map(|submit| first_status(submit).map(Status::as_str));
        Ok(Self {
            ids: batch.iter().map(|submit| *submit.id.as_uuid()).collect(),
            tenants: batch.iter().map(|submit| submit.tenant.as_str()).collect(),
            keys: batch.iter().map(|submit| submit.key.as_str()).collect(),
            hashes: batch.iter().map(|submit| submit.fingerprint.as_bytes().as_slice()).collect(),
            types: batch.iter().map(|submit| submit.request_type.as_str()).collect(),
            statuses: statuses.collect::<Result<_>>()?,
            payloads: batch.iter().map(|submit| submit.payload.bytes.as_slice()).collect(),
            key_ids: batch.iter().map(|submit| submit.payload.key_id.as_str()).collect(),
            callbacks: batch.iter().map(|submit| submit.callback_url.as_deref()).collect(),
            downstreams: batch.iter().map(|submit| submit.downstream.as_str()).collect(),
        })
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
