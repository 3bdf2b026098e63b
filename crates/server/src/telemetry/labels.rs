//! Labels that the metrics of several capabilities share.

use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    /// One of a fixed set of words, never a caller's text.
    pub(crate) outcome: &'static str,
}
