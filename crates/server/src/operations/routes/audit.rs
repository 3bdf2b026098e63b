//! The audit over HTTP, for the operator: `/admin/audit`.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use weir_core::Timestamp;
use weir_queue::MillisTime;
use weir_store::book::Recount;

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::operations::audit::Audit;
use crate::operations::recount::RunningRecount;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Begins to read all rows now, unless this server is at it. Poll until `recount.startedAt` is later than the call.
    #[serde(default)]
    full: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AuditResponse {
    /// Whether all books balance and nobody is over a limit.
    #[schema(examples(true))]
    ok: bool,
    quota: QuotaBooks,
    slot: SlotBooks,
    request: RequestBooks,
    tier: TierBooks,
    sale: SaleBooks,
    /// Whether all rows were read for this response. Otherwise the numbers are those that the database counts with each
    /// transaction, and `slot.different`, `slot.aboveMaximum` and `quota.overLimit` are of the last recount.
    #[schema(examples(true))]
    of_rows: bool,
    /// The last time that all rows were read and compared with the books; null before the first.
    recount: Option<RecountResponse>,
    /// The recount that this server is at; null if it is at none.
    recounting: Option<RecountProgress>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Recount)]
struct RecountResponse {
    /// Every table was read as it was at this time or later.
    #[schema(value_type = jiff::Timestamp)]
    started_at: MillisTime,
    #[schema(value_type = jiff::Timestamp)]
    finished_at: MillisTime,
    /// Seconds since `startedAt`.
    #[schema(examples(3_600))]
    age_seconds: u64,
    /// Counts that are not the number of rows, windows whose counter differs, products whose purchases differ, users over their
    /// limit: ten of a kind at most. Must be empty.
    #[schema(examples(json!([])))]
    differences: Vec<String>,
}

impl RecountResponse {
    fn at(recount: &Recount, now: Timestamp) -> Self {
        let differences = recount.differences.iter();
        Self {
            started_at: recount.started_at.into(),
            finished_at: recount.finished_at.into(),
            age_seconds: now.since(recount.started_at).as_secs(),
            differences: differences.map(|found| format!("{}: {}", found.book, found.what)).collect(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct RecountProgress {
    /// For how many seconds it has been running.
    #[schema(examples(12))]
    seconds: u64,
    /// What is being read.
    #[schema(examples("request_record"))]
    reading: &'static str,
}

impl From<RunningRecount> for RecountProgress {
    fn from(running: RunningRecount) -> Self {
        Self { seconds: running.began.elapsed().as_secs(), reading: running.step }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = QuotaAudit)]
struct QuotaBooks {
    /// Users with a quota.
    users: u64,
    /// Some of the users whose count is above their limit. Must be empty.
    #[schema(examples(json!([])))]
    over_limit: Vec<String>,
    /// Messages ever accepted.
    accepted: u64,
    /// Messages ever delivered.
    done: u64,
    /// Dead letters ever discarded by an operator.
    discarded: u64,
    /// Dead letters now.
    dead: u64,
    /// Messages waiting or being delivered now.
    in_flight: u64,
    /// accepted − (done + discarded + dead + inFlight). Must be 0: positive means lost, negative means delivered twice.
    difference: i128,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SlotBooks {
    /// Events that have a slot.
    slots: u64,
    /// The sum of the counters of all windows. Must equal `slots`.
    counted: u64,
    /// Some of the windows whose counter is not the number of slots scheduled inside them, as the config's name and the
    /// window's start. Must be empty.
    #[schema(examples(json!([])))]
    different: Vec<String>,
    /// Windows that were filled under a higher maximum or another window size than now. Not a fault: `ok` stays true.
    above_maximum: u64,
    /// Slots published on the store's own queue; absent unless `slot.dispatch.topic` is set and Kafka is not in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    dispatched: Option<MessageBooks>,
}

/// The counts of a topic.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct MessageBooks {
    /// Messages ever queued.
    accepted: u64,
    /// Messages ever done.
    done: u64,
    /// Dead letters ever discarded.
    discarded: u64,
    /// Dead letters now.
    dead: u64,
    /// Messages waiting or handed out now.
    in_flight: u64,
    /// accepted − (done + discarded + dead + inFlight). Must be 0.
    difference: i128,
}

impl From<weir_queue::QueueAudit> for MessageBooks {
    fn from(books: weir_queue::QueueAudit) -> Self {
        Self {
            accepted: books.accepted,
            done: books.done,
            discarded: books.discarded,
            dead: books.dead,
            in_flight: books.in_flight,
            difference: books.difference(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct RequestBooks {
    /// Requests ever accepted.
    accepted: u64,
    /// Requests that are completed.
    completed: u64,
    /// Requests that the downstream refused.
    failed: u64,
    /// Requests whose attempts all failed, discarded ones included.
    dead: u64,
    /// Requests that their tenants have cancelled.
    cancelled: u64,
    /// Requests that are not final yet.
    in_flight: u64,
    /// Requests that were purged after their retention.
    purged: u64,
    /// Requests that were erased with all data of their tenants.
    erased: u64,
    /// Jobs. Must equal `inFlight`.
    jobs: u64,
    /// How many requests are missing (positive) or too many (negative). Must be 0.
    difference: i128,
    webhooks: MessageBooks,
}

#[derive(Debug, Serialize, ToSchema)]
struct TierBooks {
    /// Stored holds. Must be the sum of `open`, `settled` and `expired`.
    holds: u64,
    /// Holds that can be settled.
    open: u64,
    /// The sum of the estimates of open holds.
    held: u64,
    /// Holds that were settled.
    settled: u64,
    /// Holds that were not settled in time, so that their estimate stays spent.
    expired: u64,
    /// Keys and users with spending in this server's memory.
    keys: usize,
    /// Keys and users whose last change is not on disk yet; a crash would lose it.
    unsaved: usize,
}

#[derive(Debug, Serialize, ToSchema)]
struct SaleBooks {
    /// Products.
    products: u64,
    /// Units sold of all products.
    sold: u64,
    /// Purchases in the store. Must equal `sold`.
    persisted: u64,
    /// Some of the products where `sold` and `persisted` differ or exceed the stock. Must be empty.
    #[schema(examples(json!([])))]
    different: Vec<String>,
    /// The newest products.
    items: Vec<ProductBooks>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ProductBooks {
    sku: String,
    initial_stock: u64,
    sold: u64,
    persisted: u64,
}

impl From<weir_store::sale::SaleAudit> for SaleBooks {
    fn from(books: weir_store::sale::SaleAudit) -> Self {
        let item = |item: weir_store::sale::ProductAudit| ProductBooks {
            sku: item.sku,
            initial_stock: item.initial_stock,
            sold: item.sold,
            persisted: item.persisted,
        };
        Self {
            products: books.products,
            sold: books.sold,
            persisted: books.persisted,
            different: books.different,
            items: books.items.into_iter().map(item).collect(),
        }
    }
}

/// Audit the books.
///
/// Proves that nothing was over-admitted and nothing got lost. Every message ever accepted must be in exactly one
/// place: done, discarded, dead or in flight. Every window's counter must be the number of slots scheduled inside it.
/// Every request ever accepted must be completed, failed, dead, cancelled, in flight, purged or erased, and each one in flight has its
/// job. Every hold must be open, settled or expired. Every unit sold must be a persisted purchase, and no more of them
/// than the stock. Each capability is read in one snapshot, so traffic does not disturb the result.
///
/// Up to `audit.rows_max` rows are read for each call. With more, the response compares the ledgers with the counts of rows
/// that the database keeps in the same transactions, and takes no longer for ten million rows than for ten. All rows are read
/// in the background, every `audit.recount_every` and when a call says `full=true`; `recount` is what that found last.
///
/// If `ok` is false, keep the response, the data and the logs, and report it: that is a fault in Weir or rows edited by
/// hand.
#[utoipa::path(
    get,
    path = "/admin/audit",
    tag = "operations",
    params(AuditQuery),
    responses(
        (
            status = 200,
            description = "The books were read. Look at `ok`: the status is 200 whether they balance or not.",
            body = AuditResponse,
        ),
    ),
)]
pub(crate) async fn audit_books(
    State(app): State<Arc<App>>,
    query: Result<Query<AuditQuery>, QueryRejection>,
) -> Result<Json<AuditResponse>, ApiError> {
    let Query(AuditQuery { full }) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    if full {
        app.recounter.begin();
    }
    let books = Audit::read(&app.engines, &app.settings, app.tier.limit_status()).await?;
    let ok = books.is_balanced();
    let Audit {
        quota,
        quota_messages: messages,
        slot,
        slot_messages,
        request,
        request_webhooks,
        tier,
        tier_keys: [keys, unsaved],
        sale,
        is_of_rows,
        recount,
    } = books;
    let now = app.engines.store.wall_clock.now();
    Ok(Json(AuditResponse {
        ok,
        quota: QuotaBooks {
            users: quota.users,
            over_limit: quota.over_limit,
            accepted: messages.accepted,
            done: messages.done,
            discarded: messages.discarded,
            dead: messages.dead,
            in_flight: messages.in_flight,
            difference: messages.difference(),
        },
        slot: SlotBooks {
            slots: slot.slots,
            counted: slot.counted,
            different: slot.different,
            above_maximum: slot.above_maximum,
            dispatched: slot_messages.map(MessageBooks::from),
        },
        request: RequestBooks {
            accepted: request.accepted,
            completed: request.completed,
            failed: request.failed,
            dead: request.dead,
            cancelled: request.cancelled,
            in_flight: request.in_flight,
            purged: request.purged,
            erased: request.erased,
            jobs: request.jobs,
            difference: request.difference(),
            webhooks: request_webhooks.into(),
        },
        tier: TierBooks {
            holds: tier.holds,
            open: tier.open,
            held: tier.open_cost,
            settled: tier.settled,
            expired: tier.expired,
            keys,
            unsaved,
        },
        sale: sale.into(),
        of_rows: is_of_rows,
        recount: recount.map(|recount| RecountResponse::at(&recount, now)),
        recounting: app.recounter.running().map(RecountProgress::from),
    }))
}
