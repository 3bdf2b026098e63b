//! Submissions as arrays for the statements that insert them.

use std::convert::Infallible;

use tokio_postgres::types::ToSql;
use uuid::Uuid;
use weir_store::request::{ExpressCounts, NewRequest};

use super::plain_key;

/// The arrays in the order of `unnest` in the statements.
pub(super) struct SubmitColumns<'a> {
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
    traceparents: Vec<Option<String>>,
    tracestates: Vec<Option<&'a str>>,
    plain_keys: Vec<Option<&'a str>>,
    /// How many jobs of the same tenant and downstream come before this one in the batch.
    places: Vec<i32>,
}

impl<'a> SubmitColumns<'a> {
    pub(super) fn new(accepted: &[NewRequest<'a>]) -> Self {
        let batch = || accepted.iter().map(|new| new.submit);
        let mut counts = ExpressCounts::default();
        let mut place = |submit| {
            let Ok::<_, Infallible>(place) = counts.count(submit, || Ok(0));
            i32::try_from(place).unwrap_or(i32::MAX)
        };
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
            traceparents: batch().map(|submit| Some(submit.trace.as_ref()?.parent.to_string())).collect(),
            tracestates: batch().map(|submit| submit.trace.as_ref()?.state.as_deref()).collect(),
            plain_keys: batch().map(plain_key).collect(),
            places: batch().map(&mut place).collect(),
        }
    }

    /// Returns the parameters of a statement: the arrays, then `rest`.
    pub(super) fn values_with<'v, const N: usize>(
        &'v self,
        rest: [&'v (dyn ToSql + Sync); N],
    ) -> Vec<&'v (dyn ToSql + Sync)> {
        let arrays: [&(dyn ToSql + Sync); 14] = [
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
            &self.traceparents,
            &self.tracestates,
            &self.plain_keys,
            &self.places,
        ];
        arrays.into_iter().chain(rest).collect()
    }
}
