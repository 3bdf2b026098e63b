//! Settings of the operators' console.

use url::Url;

use super::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsoleSettings {
    /// `console.prometheus`: a Prometheus that scrapes all servers, which the console asks about them. Without one it shows the
    /// server that it is opened on.
    pub prometheus: Option<Url>,
}

impl ConsoleSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let url = "an http:// or https:// URL of a Prometheus, without a query";
        Ok(Self { prometheus: reader.get("console.prometheus", None, prometheus, url)? })
    }
}

/// The URL below which Prometheus has its API. An empty text is none.
fn prometheus(text: &str) -> Option<Option<Url>> {
    if text.is_empty() {
        return Some(None);
    }
    let mut url: Url = text.trim().parse().ok()?;
    let is_usable = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
    url.path_segments_mut().ok()?.pop_if_empty().extend(["api", "v1"]);
    is_usable.then_some(Some(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_is_below_the_path_of_the_url() {
        let shown = |text| prometheus(text).map(|url| url.map(String::from));
        assert_eq!(shown("http://p:9090"), Some(Some("http://p:9090/api/v1".to_owned())));
        assert_eq!(shown("https://p/prometheus/"), Some(Some("https://p/prometheus/api/v1".to_owned())));
        assert_eq!(shown(""), Some(None));
        for bad in ["p:9090", "ftp://p", "http://", "http://p/?a=b", "mailto:a@b.c"] {
            assert_eq!(shown(bad), None, "{bad}");
        }
    }
}
