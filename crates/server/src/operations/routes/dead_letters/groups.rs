//! Dead letters grouped by what they died of: `GET /admin/dlq/groups`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::Query;
use axum::extract::State;
use axum::extract::rejection::QueryRejection;
use serde::Serialize;
use utoipa::ToSchema;

use super::filter::FilterFields;
use super::{DeadLetterResponse, messages, requests};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;

/// The most dead letters of each kind that are looked at.
const SCAN_MAX: usize = 10_000;
/// The most groups; what is rarer is counted together.
const GROUPS_MAX: usize = 200;
/// How much is read of a message: there is one sample of a group, and thousands of messages.
const SAMPLE_BYTES: usize = 512;
/// How much of a reason tells groups apart.
const REASON_CHARACTERS: usize = 160;

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeadLetterGroupsResponse {
    /// The largest first.
    groups: Vec<DeadLetterGroup>,
    /// How many were looked at.
    #[schema(examples(12))]
    scanned: u64,
    /// Whether there are more than were looked at: 10,000 messages and 10,000 requests are, the oldest.
    partial: bool,
    /// Dead letters of groups that are not shown.
    others: u64,
}

/// Dead letters of one topic and type that died of the same.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct DeadLetterGroup {
    #[schema(examples("requests"))]
    topic: String,
    /// For the filter `error`: the `failureCode` of requests; of messages the reason, with `…` in place of what differs.
    #[schema(examples("DOWNSTREAM_TIMEOUT"))]
    error: String,
    /// Only of requests; null otherwise.
    #[schema(required = true)]
    request_type: Option<String>,
    #[schema(examples(12))]
    count: u64,
    oldest: jiff::Timestamp,
    newest: jiff::Timestamp,
    /// The newest of them.
    sample: DeadLetterResponse,
}

/// Group dead letters by error.
///
/// What dead letters died of, with counts and one sample of each group. Takes the filters of the list.
#[utoipa::path(
    get,
    path = "/admin/dlq/groups",
    tag = "dead letters",
    params(FilterFields),
    responses((status = 200, description = "The groups.", body = DeadLetterGroupsResponse)),
)]
pub(crate) async fn group_dead_letters(
    State(app): State<Arc<App>>,
    fields: Result<Query<FilterFields>, QueryRejection>,
) -> Result<Json<DeadLetterGroupsResponse>, ApiError> {
    let Query(fields) = fields.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let filter = fields.parse()?;
    let ((messages, more_messages), (requests, more_requests)) = tokio::try_join!(
        messages::scan(&app, &filter, None, SCAN_MAX, SAMPLE_BYTES),
        requests(&app, &filter, None, SCAN_MAX),
    )?;
    let partial = more_messages.is_some() || more_requests.is_some();
    let letters = messages.into_iter().chain(requests);
    Ok(Json(group(letters, partial)))
}

fn group(letters: impl Iterator<Item = DeadLetterResponse>, partial: bool) -> DeadLetterGroupsResponse {
    let mut groups: BTreeMap<(String, String, Option<String>), DeadLetterGroup> = BTreeMap::new();
    let mut scanned = 0;
    for mut letter in letters {
        scanned += 1;
        letter.cut_payload();
        let request_type = letter.request.as_ref().map(|request| request.request_type.clone());
        let code = letter.request.as_ref().and_then(|request| request.failure_code.clone());
        let error = code.unwrap_or_else(|| common_reason(&letter.reason));
        let (topic, died_at) = (letter.topic.clone(), letter.died_at);
        match groups.get_mut(&(topic.clone(), error.clone(), request_type.clone())) {
            Some(group) => {
                group.count += 1;
                group.oldest = group.oldest.min(died_at);
                if died_at >= group.newest {
                    (group.newest, group.sample) = (died_at, letter);
                }
            }
            None => {
                let group = DeadLetterGroup {
                    topic: topic.clone(),
                    error: error.clone(),
                    request_type: request_type.clone(),
                    count: 1,
                    oldest: died_at,
                    newest: died_at,
                    sample: letter,
                };
                groups.insert((topic, error, request_type), group);
            }
        }
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse((group.count, group.newest)));
    let others = groups.iter().skip(GROUPS_MAX).map(|group| group.count).sum();
    groups.truncate(GROUPS_MAX);
    DeadLetterGroupsResponse { groups, scanned, partial, others }
}

/// The reason without numbers and what is quoted, which differ from letter to letter.
fn common_reason(reason: &str) -> String {
    let (mut common, mut quote) = (String::new(), None);
    for character in reason.chars().take(REASON_CHARACTERS) {
        let hides = quote.is_some() || character.is_ascii_digit();
        match quote {
            Some(open) if open == character => quote = None,
            None if matches!(character, '"' | '`') => quote = Some(character),
            _ if hides => {
                if !common.ends_with('…') {
                    common.push('…');
                }
                continue;
            }
            _ => {}
        }
        common.push(character);
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(topic: &str, reason: &str, second: i64) -> DeadLetterResponse {
        DeadLetterResponse {
            id: second.to_string(),
            topic: topic.to_owned(),
            key: "k".to_owned(),
            payload: String::new(),
            truncated: false,
            reason: reason.to_owned(),
            attempts: 1,
            died_at: jiff::Timestamp::from_second(second).unwrap(),
            request: None,
        }
    }

    #[test]
    fn reasons_that_differ_in_numbers_and_quoted_text_are_one_group() {
        let letters = [
            letter("sms", "missing field `userId` at line 1 column 14", 5),
            letter("sms", "missing field `message` at line 1 column 200", 9),
            letter("sms", "the provider answered 410", 1),
            letter("webhooks", "the provider answered 410", 2),
        ];
        let grouped = group(letters.into_iter(), false);
        let shown: Vec<_> =
            grouped.groups.iter().map(|one| (one.topic.as_str(), one.error.as_str(), one.count)).collect();
        assert_eq!(
            shown,
            [
                ("sms", "missing field `…` at line … column …", 2),
                ("webhooks", "the provider answered …", 1),
                ("sms", "the provider answered …", 1),
            ]
        );
        let first = &grouped.groups[0];
        assert_eq!(
            (first.oldest.as_second(), first.newest.as_second(), first.sample.id.as_str()),
            (5, 9, "9")
        );
        assert_eq!((grouped.scanned, grouped.others), (4, 0));
    }

    #[test]
    fn there_are_no_more_groups_than_the_bound() {
        let letters = (0..300_i64).map(|n| letter(&format!("topic {n}"), "x", n));
        let grouped = group(letters, true);
        assert_eq!((grouped.groups.len(), grouped.others, grouped.partial), (GROUPS_MAX, 100, true));
    }
}
