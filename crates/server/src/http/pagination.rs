//! Pagination of lists: `{"items":[…],"nextCursor":…|null}`.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::error::ApiError;

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1_000;

/// The query of a request for a page.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// The most items to return.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    pub(crate) limit: Option<String>,
    /// The `nextCursor` of the page before. Leave it out for the first page.
    #[param(value_type = String, required = false)]
    pub(crate) cursor: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Page<T> {
    items: Vec<T>,
    /// Pass it as `cursor` for the next page; null on the last page.
    #[schema(required = true)]
    next_cursor: Option<String>,
}

impl<T> Page<T> {
    /// Returns the first `limit` of `items`. If there are more, the next page begins after the last item returned.
    pub(crate) fn cut(mut items: Vec<T>, limit: usize, cursor: impl Fn(&T) -> String) -> Self {
        let has_more = items.len() > limit;
        items.truncate(limit);
        let next_cursor = items.last().filter(|_| has_more).map(cursor);
        Self { items, next_cursor }
    }

    /// Sets the cursor of the next page if the page has none yet.
    #[must_use]
    pub(crate) fn or_next_cursor(mut self, cursor: Option<String>) -> Self {
        self.next_cursor = self.next_cursor.or(cursor);
        self
    }
}

/// Parses the `limit` of a query.
pub(crate) fn parse_limit(text: Option<&str>) -> Result<usize, ApiError> {
    let Some(text) = text else {
        return Ok(LIMIT_DEFAULT);
    };
    let limit = text.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
    limit.ok_or_else(|| ApiError::invalid_field("limit", format!("must be an integer from 1 to {LIMIT_MAX}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_names_its_last_item_when_there_are_more() {
        let cursor = |item: &u32| item.to_string();
        assert_eq!(Page::cut(vec![1, 2, 3], 2, cursor).next_cursor.as_deref(), Some("2"));
        assert_eq!(Page::cut(vec![1, 2], 2, cursor).next_cursor, None);
        assert_eq!(Page::cut(Vec::new(), 2, cursor).next_cursor, None);
    }

    #[test]
    fn limits_have_bounds() {
        assert_eq!(parse_limit(None).ok(), Some(100));
        for bad in ["0", "1001", "x", "-1", ""] {
            assert!(parse_limit(Some(bad)).is_err(), "{bad}");
        }
    }
}
