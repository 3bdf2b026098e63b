//! Settings of traces: where spans are sent, and which traces are recorded.

use url::Url;
use weir_core::TraceId;

use super::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceSettings {
    /// `traces.otlp_endpoint`, or `OTEL_EXPORTER_OTLP_ENDPOINT`: the collector, which receives spans under `/v1/traces`. No spans
    /// are recorded without one.
    pub otlp_endpoint: Option<Url>,
    /// `traces.sample_ratio`: the share of the traces that begin here which are recorded.
    pub sample_ratio: SampleRatio,
    /// `traces.service_name`, or `OTEL_SERVICE_NAME`.
    pub service_name: String,
}

/// A share of traces. All servers with the same ratio choose the same traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleRatio {
    /// Traces are included if the last 64 bits of their id are below.
    below: u128,
}

impl SampleRatio {
    /// One in a hundred.
    const DEFAULT: f64 = 0.01;

    fn new(ratio: f64) -> Option<Self> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a ratio from 0 to 1 gives at most 2^64"
        )]
        let below = |ratio: f64| (ratio * 2.0_f64.powi(64)) as u128;
        (0.0..=1.0).contains(&ratio).then(|| Self { below: below(ratio) })
    }

    #[must_use]
    pub fn includes(self, trace: TraceId) -> bool {
        let [.., a, b, c, d, e, f, g, h] = trace.to_bytes();
        u128::from(u64::from_be_bytes([a, b, c, d, e, f, g, h])) < self.below
    }
}

impl TraceSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let ratio = |text: &str| SampleRatio::new(text.trim().parse().ok()?);
        let name = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let sample_ratio = reader.get_optional("traces.sample_ratio", ratio, "a number from 0 to 1")?;
        let url = "an http:// or https:// URL of a collector, without a query";
        Ok(Self {
            otlp_endpoint: reader.get("traces.otlp_endpoint", None, collector, url)?,
            sample_ratio: sample_ratio
                .or_else(|| SampleRatio::new(SampleRatio::DEFAULT))
                .unwrap_or(SampleRatio { below: 0 }),
            service_name: reader.get("traces.service_name", "weir".to_owned(), name, "not empty")?,
        })
    }
}

/// The URL to which spans are sent. An empty text is none.
fn collector(text: &str) -> Option<Option<Url>> {
    if text.is_empty() {
        return Some(None);
    }
    let mut url: Url = text.parse().ok()?;
    let is_usable = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
    url.path_segments_mut().ok()?.pop_if_empty().extend(["v1", "traces"]);
    is_usable.then_some(Some(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_sent_below_the_path_of_the_collector() {
        let shown = |text| collector(text).map(|url| url.map(String::from));
        assert_eq!(shown("http://c:4318"), Some(Some("http://c:4318/v1/traces".to_owned())));
        assert_eq!(shown("https://c/otlp/"), Some(Some("https://c/otlp/v1/traces".to_owned())));
        assert_eq!(shown(""), Some(None));
        for bad in ["c:4318", "grpc://c:4317", "http://", "http://c/?a=b", "mailto:a@b.c"] {
            assert_eq!(shown(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_ratio_selects_that_share_of_traces() {
        assert_eq!(SampleRatio::new(1.1), None);
        assert_eq!(SampleRatio::new(-0.1), None);
        assert_eq!(SampleRatio::new(f64::NAN), None);
        let (none, half, all) = (SampleRatio::new(0.0), SampleRatio::new(0.5), SampleRatio::new(1.0));
        for (low, expected) in
            [(1, [false, true, true]), (u64::MAX / 2, [false, true, true]), (u64::MAX, [false, false, true])]
        {
            let trace = TraceId::from_number((7 << 64) | u128::from(low));
            assert_eq!([none, half, all].map(|ratio| ratio.unwrap().includes(trace)), expected, "{low}");
        }
    }
}
