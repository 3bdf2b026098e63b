//! Policies in a settings file: `[policies.<name>]` with the fields of the HTTP API, in `snake_case` or `camelCase`.

use std::collections::BTreeMap;

use weir_core::PolicyName;
use weir_store::tier::Match;

use super::policy_input::{PolicyDefinition, PolicyFieldError, PolicyFields};
use crate::settings::source::SettingError;

type Tables = BTreeMap<String, BTreeMap<String, String>>;

/// Reads the tables below `policies`; `x.match` and `x.match.entries` belong to policy `x`.
pub(super) fn read_all(tables: &Tables) -> Result<BTreeMap<PolicyName, PolicyDefinition>, SettingError> {
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

fn read_one(tables: &Tables, name: &str) -> Result<PolicyDefinition, SettingError> {
    let no_fields = BTreeMap::new();
    let texts = tables.get(name).unwrap_or(&no_fields);
    let mut fields = PolicyFields::default();
    for (field, text) in texts {
        let wrong = |allowed: &str| SettingError::new(format!("policies.{name}.{field}"), text, allowed);
        let number = || text.parse().map(Some).map_err(|_no_number| wrong("a number"));
        match field.as_str() {
            "kind" => fields.kind = Some(text.clone()),
            "limit" => fields.limit = number()?,
            "capacity" => fields.capacity = number()?,
            "refill" => fields.refill = number()?,
            "window" => fields.window = Some(text.clone()),
            "period" => fields.period = Some(text.clone()),
            "ttl" => fields.ttl = Some(text.clone()),
            "shadow" => {
                fields.shadow = super::boolean(text).ok_or_else(|| wrong("true or false"))?;
            }
            "on_outage" | "onOutage" => fields.on_outage = Some(text.clone()),
            _ => return Err(wrong("left out: docs/tier.md lists the fields of a policy")),
        }
    }
    fields.matches = read_match(tables, name)?;
    fields.into_definition().map_err(|PolicyFieldError { field, problem }| {
        let key = if field == "onOutage" { "on_outage" } else { field };
        let value = texts.get(key).map_or("", String::as_str);
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
