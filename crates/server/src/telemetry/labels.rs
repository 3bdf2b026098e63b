//! Labels that the metrics of several capabilities share.

use http::Method;
use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    /// One of a fixed set of words, never a caller's text.
    pub(crate) outcome: &'static str,
}

/// A downstream of the settings.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DownstreamLabels {
    /// Its name in the settings, or `default`; never one from a caller.
    pub downstream: String,
}

/// The name of an HTTP method, or `other` for one outside of the fixed set.
pub(crate) fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        _ => "other",
    }
}
