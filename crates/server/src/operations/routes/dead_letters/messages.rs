//! Dead messages of all topics, filtered.

use std::collections::HashMap;

use futures_util::future::join_all;
use weir_core::RequestId;
use weir_queue::DeadLetter;
use weir_store::Result;
use weir_store::request::{Request, WEBHOOKS_TOPIC};

use super::filter::DeadLetterFilter;
use super::{DeadLetterResponse, describe};
use crate::app::App;
use crate::engines::within;
use crate::http::error::ApiError;
use crate::request::service::dead_letters::ReplayCounts;

/// Dead messages read together.
const SCAN_PAGE: usize = 500;
/// The most dead messages that are scanned for one page of a filtered list.
const SCAN_MAX: usize = 10_000;
/// How many are replayed at the same time: engines make one commit of those.
const CONCURRENT_REPLAYS: usize = 16;
/// Enough of a reason to find an error in it. Payloads are cut to as many bytes.
const REASON_CHARACTERS: usize = 4_096;

/// Lists dead messages in order of id.
pub(super) async fn list(
    app: &App,
    after: Option<&str>,
    limit: usize,
    payload_max: usize,
) -> Result<Vec<DeadLetter>> {
    within(app.settings.http.timeout, app.engines.store.queue.dead_letters(after, limit, payload_max)).await
}

/// Scans for up to `limit` that match. Also returns where the scan stopped before the end.
pub(super) async fn scan(
    app: &App,
    filter: &DeadLetterFilter,
    after: Option<&str>,
    limit: usize,
    payload_max: usize,
) -> Result<(Vec<DeadLetterResponse>, Option<String>), ApiError> {
    let (mut found, mut scanned) = (Vec::new(), 0);
    let mut after = after.map(str::to_owned);
    // An unfiltered page needs no more than it shows.
    let page_size = if filter.is_empty() { limit } else { SCAN_PAGE };
    loop {
        let page = list(app, after.as_deref(), page_size, payload_max).await?;
        let (count, last) = (page.len(), page.last().map(|letter| letter.id.clone()));
        scanned += count;
        for letter in matching(app, filter, page).await? {
            let id = letter.id.clone();
            found.push(describe(letter));
            if found.len() >= limit {
                return Ok((found, Some(id)));
            }
        }
        if count < page_size {
            return Ok((found, None));
        }
        if scanned >= SCAN_MAX {
            return Ok((found, last));
        }
        after = last;
    }
}

/// Replays those that match, or with `dry_run` only counts them.
pub(super) async fn replay(app: &App, filter: &DeadLetterFilter, dry_run: bool) -> Result<ReplayCounts> {
    let (queue, timeout) = (&app.engines.store.queue, app.settings.http.timeout);
    if filter.is_empty() && !dry_run {
        let replayed = within(timeout, queue.replay_all()).await?;
        return Ok(ReplayCounts { matched: replayed, replayed });
    }
    // No more than there were at the start: one that dies again is listed again, and it might never end.
    let mut left = count(app).await?;
    let (mut counts, mut after) = (ReplayCounts::default(), None);
    while left > 0 {
        let page = list(app, after.as_deref(), SCAN_PAGE.min(left), REASON_CHARACTERS).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.id.clone());
        left -= page.len();
        let letters = matching(app, filter, page).await?;
        counts.matched += letters.len() as u64;
        if dry_run {
            continue;
        }
        for chunk in letters.chunks(CONCURRENT_REPLAYS) {
            let mut replays = Vec::with_capacity(chunk.len());
            for letter in chunk {
                replays.push(within(timeout, queue.replay(&letter.id)));
            }
            for replayed in join_all(replays).await {
                counts.replayed += u64::from(replayed?);
            }
        }
    }
    Ok(counts)
}

/// Counts the dead messages of all topics.
async fn count(app: &App) -> Result<usize> {
    let (mut count, mut after) = (0, None);
    loop {
        let page = list(app, after.as_deref(), SCAN_PAGE, 0).await?;
        count += page.len();
        match page.last() {
            Some(last) if page.len() == SCAN_PAGE => after = Some(last.id.clone()),
            _ => return Ok(count),
        }
    }
}

/// Those that match. The requests that webhooks are about are read only if the filter depends on them.
async fn matching(app: &App, filter: &DeadLetterFilter, letters: Vec<DeadLetter>) -> Result<Vec<DeadLetter>> {
    let id_of = |letter: &DeadLetter| {
        let is_webhook = letter.topic == WEBHOOKS_TOPIC;
        if is_webhook { RequestId::parse(&letter.key) } else { None }
    };
    let ids: Vec<RequestId> =
        if filter.needs_request() { letters.iter().filter_map(id_of).collect() } else { Vec::new() };
    let mut requests: HashMap<RequestId, Request> = HashMap::with_capacity(ids.len());
    if !ids.is_empty() {
        let found =
            within(app.settings.http.timeout, app.engines.store.requests.find_summaries(&ids)).await?;
        requests.extend(found.into_iter().map(|request| (request.id, request)));
    }
    let matches = |letter: &DeadLetter| {
        let request = id_of(letter).and_then(|id| requests.get(&id));
        filter.matches_message(letter, request)
    };
    Ok(letters.into_iter().filter(matches).collect())
}
