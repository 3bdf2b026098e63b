//! Settings of downstreams: `WEIR_DOWNSTREAM` and `[request.downstreams.<name>]`.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use url::Url;
use weir_core::RequestType;

use super::{RequestSettings, SPAN};
use crate::settings::parse::{boolean, certificates_file, count, duration, http_url, optional_url};
use crate::settings::source::{SettingError, SettingsReader};

const TABLES: &str = "request.downstreams";

const URL: &str = "an http:// or https:// URL";
const CERTIFICATES: &str = "a file of certificates in PEM that can be read";
const TYPES: &str = "a list of request types";
const CALLS: &str = "a number from 1 to 1000000";
const FIELDS: &str = "left out: a downstream has url, types, per_second, concurrency, headers, sign, connect_timeout, \
                      read_timeout and sslrootcert";
const HEADER: &str = "a header's value, or \"env:NAME\" for the value of an environment variable that is set";

/// What a value begins with that is in the environment.
const FROM_ENVIRONMENT: &str = "env:";

/// Headers that Weir sets itself, or that belong to the connection.
const OWN_HEADERS: [HeaderName; 16] = [
    CONTENT_TYPE,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    HOST,
    CONNECTION,
    UPGRADE,
    TE,
    TRAILER,
    USER_AGENT,
    HeaderName::from_static("idempotency-key"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("webhook-id"),
    HeaderName::from_static("webhook-timestamp"),
    HeaderName::from_static("webhook-signature"),
];

/// A service that is called for requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownstreamSettings {
    /// The built-in echo answers if absent.
    pub url: Option<Url>,
    /// The types of its requests; `None` if it lists none.
    pub types: Option<Vec<String>>,
    /// The most calls that one process begins in a second.
    pub per_second: Option<NonZeroU32>,
    /// The most calls of one process that are under way.
    pub concurrency: Option<usize>,
    /// Headers of each call, credentials among them. `Debug` does not show their values.
    pub headers: HeaderMap,
    /// Whether calls are signed like webhooks, with the master secret.
    pub sign: bool,
    /// How long the downstream may take to accept a connection.
    pub connect_timeout: Duration,
    /// How long the downstream may take to answer.
    pub read_timeout: Duration,
    /// A file of certificate authorities to trust instead of the system's.
    pub sslrootcert: Option<PathBuf>,
}

impl DownstreamSettings {
    const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
    const READ_TIMEOUT: Duration = Duration::from_secs(3);

    /// Reads the downstream for types that have none of their own.
    pub(super) fn read_default(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let (connect, read) = (Self::CONNECT_TIMEOUT, Self::READ_TIMEOUT);
        Ok(Self {
            url: reader.get("downstream", None, optional_url, URL)?,
            types: None,
            per_second: None,
            concurrency: None,
            headers: HeaderMap::new(),
            sign: false,
            connect_timeout: reader.get("request.connect_timeout", connect, duration, SPAN)?,
            read_timeout: reader.get("request.read_timeout", read, duration, SPAN)?,
            sslrootcert: reader.get("request.sslrootcert", None, certificates_file, CERTIFICATES)?,
        })
    }

    /// Sets the field that a table has.
    fn set(&mut self, name: &str, field: &str, text: &str) -> Result<(), SettingError> {
        let setting = || format!("{TABLES}.{name}.{field}");
        let wrong = |allowed: &str| SettingError::new(setting(), text, allowed);
        let span = || duration(text).ok_or_else(|| wrong(SPAN));
        match field {
            // Credentials may be in it.
            "url" => self.url = Some(http_url(text).ok_or_else(|| SettingError::secret(setting(), URL))?),
            "types" => self.types = Some(types(text).ok_or_else(|| wrong(TYPES))?),
            "per_second" => self.per_second = Some(per_second(text).ok_or_else(|| wrong(CALLS))?),
            "concurrency" => {
                self.concurrency = Some(count(1_000_000)(text).ok_or_else(|| wrong(CALLS))?);
            }
            "sign" => self.sign = boolean(text).ok_or_else(|| wrong("true or false"))?,
            "connect_timeout" => self.connect_timeout = span()?,
            "read_timeout" => self.read_timeout = span()?,
            "sslrootcert" => {
                self.sslrootcert = certificates_file(text).ok_or_else(|| wrong(CERTIFICATES))?;
            }
            // A header in the wrong table may be a credential.
            _ => return Err(SettingError::secret(setting(), FIELDS)),
        }
        Ok(())
    }
}

/// Reads `[request.downstreams.<name>]`. What a table leaves out of timeouts and authorities is as in `default`.
pub(super) fn read_tables(
    reader: &mut SettingsReader,
    default: &DownstreamSettings,
) -> Result<BTreeMap<String, DownstreamSettings>, SettingError> {
    let tables = reader.tables(TABLES);
    let mut downstreams = BTreeMap::new();
    for (name, fields) in &tables {
        if headers_of(name).is_some_and(|owner| tables.contains_key(owner)) {
            continue;
        }
        let mut downstream = DownstreamSettings { url: None, ..default.clone() };
        for (field, text) in fields {
            downstream.set(name, field, text)?;
        }
        if let Some(headers) = tables.get(&format!("{name}.headers")) {
            downstream.headers = read_headers(reader, name, headers)?;
        }
        if downstream.url.is_none() {
            return Err(SettingError::new(format!("{TABLES}.{name}.url"), "", URL));
        }
        downstreams.insert(name.clone(), downstream);
    }
    check_types(&downstreams)?;
    Ok(downstreams)
}

/// The downstream whose headers a table of this name has.
fn headers_of(table: &str) -> Option<&str> {
    table.strip_suffix(".headers")
}

/// Each type must have one downstream.
fn check_types(downstreams: &BTreeMap<String, DownstreamSettings>) -> Result<(), SettingError> {
    let mut seen = BTreeSet::new();
    for (name, of) in downstreams {
        for listed in of.types.iter().flatten() {
            if !seen.insert(listed) {
                let allowed = "without types that another downstream lists";
                return Err(SettingError::new(format!("{TABLES}.{name}.types"), listed, allowed));
            }
        }
    }
    Ok(())
}

/// The name of the downstream for types that no other has: the only table that lists no types, if others list theirs or there
/// is no default downstream.
pub(super) fn takes_the_rest<'a>(
    default: &DownstreamSettings,
    downstreams: &'a BTreeMap<String, DownstreamSettings>,
) -> &'a str {
    let mut without = downstreams.iter().filter(|(_, of)| of.types.is_none());
    let some_list_types = downstreams.values().any(|of| of.types.is_some());
    match (without.next(), without.next()) {
        (Some((name, _)), None) if some_list_types || default.url.is_none() => name,
        _ => RequestSettings::DEFAULT_DOWNSTREAM,
    }
}

fn read_headers(
    reader: &mut SettingsReader,
    downstream: &str,
    fields: &BTreeMap<String, String>,
) -> Result<HeaderMap, SettingError> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for (field, text) in fields {
        let setting = format!("{TABLES}.{downstream}.headers.{field}");
        let name = HeaderName::try_from(field.as_str()).ok().filter(|name| !OWN_HEADERS.contains(name));
        let name = name.ok_or_else(|| {
            SettingError::secret(&setting, "the name of a header that Weir does not set itself")
        })?;
        let value = match text.strip_prefix(FROM_ENVIRONMENT) {
            Some(variable) => reader.environment_variable(variable),
            None => Some(text.clone()),
        };
        let value = value.and_then(|value| HeaderValue::try_from(value).ok());
        let mut value = value.ok_or_else(|| SettingError::secret(&setting, HEADER))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

fn types(text: &str) -> Option<Vec<String>> {
    let types = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    types.map(|name| RequestType::parse(name).ok().map(|name| name.as_str().to_owned())).collect()
}

fn per_second(text: &str) -> Option<NonZeroU32> {
    text.trim().parse::<NonZeroU32>().ok().filter(|calls| calls.get() <= 1_000_000)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::settings::source::{Sources, flatten_toml};

    fn read(file: &str, environment: &[(&str, &str)]) -> Result<RequestSettings, SettingError> {
        let values = flatten_toml(Path::new("weir.toml"), file)?;
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let sources = Sources {
            environment: environment.iter().map(owned).collect(),
            file: Some(("weir.toml".into(), values)),
            ..Sources::default()
        };
        RequestSettings::read(&mut SettingsReader::new(sources))
    }

    fn name_for(settings: &RequestSettings, request_type: &str) -> String {
        settings.downstream_name(&RequestType::parse(request_type).unwrap()).to_owned()
    }

    #[test]
    fn types_choose_the_downstream_and_one_takes_the_rest() {
        let table = |name: &str, more: &str| {
            format!("[request.downstreams.{name}]\nurl = \"http://127.0.0.1:1/\"\n{more}\n")
        };
        let default = "downstream = \"http://127.0.0.1:2/\"\n";
        let listing = table("bank", "types = [\"payment\", \"refund\"]");
        let (other, mail) = (table("other", ""), table("mail", ""));
        for (file, expected) in [
            // A table without types has the type of its name; the rest go to the default.
            (format!("{default}{mail}{other}"), ["", "", "mail", ""]),
            (format!("{mail}{other}"), ["", "", "mail", ""]),
            (format!("{default}{mail}"), ["", "", "mail", ""]),
            // The only one takes the rest, too, if there is no default or others list their types.
            (mail.clone(), ["mail", "mail", "mail", "mail"]),
            (format!("{listing}{other}"), ["bank", "bank", "other", "other"]),
            (format!("{default}{listing}{other}"), ["bank", "bank", "other", "other"]),
            (format!("{default}{listing}"), ["bank", "bank", "", ""]),
            (format!("{default}{listing}{other}{mail}"), ["bank", "bank", "mail", ""]),
        ] {
            let settings = read(&file, &[]).unwrap();
            let names = ["payment", "refund", "mail", "bank"].map(|name| name_for(&settings, name));
            assert_eq!(names, expected, "{file}");
        }
        let twice = format!("{listing}{}", table("copy", "types = [\"refund\"]"));
        assert!(read(&twice, &[]).unwrap_err().to_string().contains("another downstream"));
    }

    #[test]
    fn headers_come_from_the_file_or_the_environment_and_are_never_shown() {
        let file = "[request.downstreams.pay]\nurl = \"http://127.0.0.1:1/\"\nper_second = 50\nconcurrency = 4\n\
                    sign = true\nheaders = { authorization = \"env:PAY_TOKEN\", x-team = \"blue\" }";
        let settings = read(file, &[("PAY_TOKEN", "Bearer s3cret")]).unwrap();
        let pay = &settings.downstreams["pay"];
        assert_eq!((pay.per_second, pay.concurrency, pay.sign), (NonZeroU32::new(50), Some(4), true));
        assert_eq!(pay.headers["authorization"], "Bearer s3cret");
        assert_eq!(pay.headers["x-team"], "blue");
        let shown = format!("{settings:?}");
        assert!(!shown.contains("s3cret") && !shown.contains("blue"), "{shown}");
        for (wrong, environment) in [
            ("authorization = \"env:PAY_TOKEN\"", &[][..]),
            ("authorization = \"env:PAY_TOKEN\"", &[("PAY_TOKEN", "s3cret\n")][..]),
            ("content-type = \"s3cret\"", &[][..]),
            ("\"x y\" = \"s3cret\"", &[][..]),
        ] {
            let file =
                format!("[request.downstreams.pay]\nurl = \"http://127.0.0.1:1/\"\nheaders = {{ {wrong} }}");
            let sentence = read(&file, environment).unwrap_err().to_string();
            assert!(sentence.contains("request.downstreams.pay.headers."), "{sentence}");
            assert!(!sentence.contains("s3cret"), "{sentence}");
        }
    }

    #[test]
    fn fields_in_the_wrong_place_and_wrong_urls_are_not_shown() {
        for (wrong, field) in [
            ("url = \"http://127.0.0.1:1/\"\nauthorization = \"Bearer s3cret\"", "authorization"),
            ("url = \"ftp://user:s3cret@127.0.0.1/\"", "url"),
            ("url = \"http://user:s3cret@\"", "url"),
        ] {
            let file = format!("[request.downstreams.pay]\n{wrong}");
            let sentence = read(&file, &[]).unwrap_err().to_string();
            assert!(sentence.contains(&format!("request.downstreams.pay.{field}")), "{sentence}");
            assert!(!sentence.contains("s3cret"), "{sentence}");
        }
    }

    #[test]
    fn limits_must_be_positive_numbers() {
        for wrong in ["per_second = 0", "concurrency = 0", "per_second = \"x\"", "sign = 2", "per_minute = 5"]
        {
            let file = format!("[request.downstreams.pay]\nurl = \"http://127.0.0.1:1/\"\n{wrong}");
            assert!(
                read(&file, &[]).unwrap_err().to_string().contains("request.downstreams.pay."),
                "{wrong}"
            );
        }
    }
}
