//! Labels that the metrics of several capabilities share.

use prometheus_client::encoding::EncodeLabelSet;

/// How something ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    /// One of a few fixed words.
    pub outcome: &'static str,
}
