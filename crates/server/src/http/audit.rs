//! The books over HTTP, for the operator: `/admin/audit`.

use std::sync::Arc;

use axum::extract::State;
use serde::Serialize;

use super::body::Json;
use super::error::ApiError;
use crate::app::App;
use crate::service::audit::Books;

#[derive(Debug, Serialize)]
pub(crate) struct AuditResponse {
    ok: bool,
    quota: QuotaBooks,
    slot: SlotBooks,
    request: RequestBooks,
    tier: TierBooks,
    sale: SaleBooks,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct QuotaBooks {
    users: u64,
    over_limit: Vec<String>,
    accepted: u64,
    done: u64,
    discarded: u64,
    dead: u64,
    in_flight: u64,
    difference: i128,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SlotBooks {
    slots: u64,
    counted: u64,
    different: Vec<String>,
    above_maximum: u64,
    /// Only where slots are dispatched on the store's own queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    dispatched: Option<MessageBooks>,
}

/// The books of a topic.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MessageBooks {
    accepted: u64,
    done: u64,
    discarded: u64,
    dead: u64,
    in_flight: u64,
    difference: i128,
}

impl From<weir_queue::Books> for MessageBooks {
    fn from(books: weir_queue::Books) -> Self {
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

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RequestBooks {
    accepted: u64,
    completed: u64,
    failed: u64,
    dead: u64,
    in_flight: u64,
    purged: u64,
    jobs: u64,
    difference: i128,
    webhooks: MessageBooks,
}

#[derive(Debug, Serialize)]
struct TierBooks {
    holds: u64,
    open: u64,
    held: u64,
    settled: u64,
    expired: u64,
    keys: usize,
    unsaved: usize,
}

#[derive(Debug, Serialize)]
struct SaleBooks {
    products: u64,
    sold: u64,
    persisted: u64,
    different: Vec<String>,
    items: Vec<ProductBooks>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProductBooks {
    sku: String,
    initial_stock: u64,
    sold: u64,
    persisted: u64,
}

impl From<weir_store::sale::Books> for SaleBooks {
    fn from(books: weir_store::sale::Books) -> Self {
        let item = |item: weir_store::sale::ProductBooks| ProductBooks {
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

/// `GET /admin/audit`
pub(crate) async fn audit_books(State(app): State<Arc<App>>) -> Result<Json<AuditResponse>, ApiError> {
    let books = Books::read(&app.engines, &app.settings).await?;
    let ok = books.balance();
    let Books {
        quota,
        quota_messages: messages,
        slot,
        slot_messages,
        request,
        request_webhooks,
        tier,
        tier_keys: [keys, unsaved],
        sale,
    } = books;
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
            in_flight: request.in_flight,
            purged: request.purged,
            jobs: request.jobs,
            difference: request.difference(),
            webhooks: request_webhooks.into(),
        },
        tier: TierBooks {
            holds: tier.holds,
            open: tier.open,
            held: tier.held,
            settled: tier.settled,
            expired: tier.expired,
            keys,
            unsaved,
        },
        sale: sale.into(),
    }))
}
