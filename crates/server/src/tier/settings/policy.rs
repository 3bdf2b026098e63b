//! Policies in a file: `[policies.<name>]`, in the form that operators send, with the names of fields in either spelling.

use std::collections::BTreeMap;

use weir_core::PolicyName;
use weir_store::tier::{Match, PolicySpec};

use super::policy_input::{Fields, FormError};
use crate::settings::source::SettingError;

type Tables = BTreeMap<String, BTreeMap<String, String>>;

/// The tables below `policies`, of which `x.match` and `x.match.entries` belong to `x`.
pub(super) fn read_all(tables: &Tables) -> Result<BTreeMap<PolicyName, PolicySpec>, SettingError> {
    let mut policies = BTreeMap::new();
    for name in tables.keys() {
        let name =
            name.strip_suffix(".match.entries").or_else(|| name.strip_suffix(".match")).unwrap_or(name);
        let parsed = PolicyName::parse(name)
            .map_err(|problem| SettingError::new("policies", name, format!("a name that {problem}")))?;
        policies.insert(parsed, read_one(tables, name)?);
    }
    Ok(policies)
}

fn read_one(tables: &Tables, name: &str) -> Result<PolicySpec, SettingError> {
    let nothing = BTreeMap::new();
    let fields = tables.get(name).unwrap_or(&nothing);
    let mut form = Fields::default();
    for (field, text) in fields {
        let wrong = |allowed: &str| SettingError::new(format!("policies.{name}.{field}"), text, allowed);
        let number = || text.parse().map(Some).map_err(|_no_number| wrong("a number"));
        match field.as_str() {
            "kind" => form.kind = Some(text.clone()),
            "limit" => form.limit = number()?,
            "capacity" => form.capacity = number()?,
            "refill" => form.refill = number()?,
            "window" => form.window = Some(text.clone()),
            "period" => form.period = Some(text.clone()),
            "shadow" => {
                form.shadow = super::boolean(text).ok_or_else(|| wrong("true or false"))?;
            }
            "on_outage" | "onOutage" => form.on_outage = Some(text.clone()),
            _ => return Err(wrong("left out: docs/tier.md lists the fields of a policy")),
        }
    }
    form.matches = read_match(tables, name)?;
    form.into_spec().map_err(|FormError { field, problem }| {
        let key = if field == "onOutage" { "on_outage" } else { field };
        let value = fields.get(key).map_or("", String::as_str);
        SettingError::new(format!("policies.{name}.{key}"), value, problem.trim_start_matches("must be "))
    })
}

fn read_match(tables: &Tables, name: &str) -> Result<Option<Match>, SettingError> {
    let (head, entries) =
        (tables.get(&format!("{name}.match")), tables.get(&format!("{name}.match.entries")));
    if head.is_none() && entries.is_none() {
        return Ok(None);
    }
    let domain = head.and_then(|head| head.get("domain")).cloned().unwrap_or_default();
    if let Some((field, text)) = head.and_then(|head| head.iter().find(|(field, _)| *field != "domain")) {
        let allowed = "left out: a match has domain and entries";
        return Err(SettingError::new(format!("policies.{name}.match.{field}"), text, allowed));
    }
    Ok(Some(Match { domain, entries: entries.cloned().unwrap_or_default() }))
}
