//! The purchases of a product, for the operator: a page as JSON, or all of them as CSV.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;
use utoipa::ToSchema;
use weir_core::Timestamp;
use weir_store::Error;
use weir_store::sale::{Product, Purchase, PurchasePosition};

use super::products::{parse_path, unknown_product};
use super::{Success, success, time_text};
use crate::app::App;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::http::sale_error::SaleError;

/// Purchases that are read at once for a CSV.
const CSV_PAGE: usize = 1_000;
const CSV_HEADER: &str = "purchaseNo,userId,purchasedAt\n";

/// A purchase and its buyer.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ProductPurchase {
    /// `PUR-`, the day in UTC, and the number of the purchase in its sale, in four digits or more.
    #[schema(examples("PUR-20260215-0001"))]
    purchase_no: String,
    #[schema(value_type = schema::UserId)]
    user_id: String,
    /// When it was bought.
    #[schema(format = DateTime)]
    purchased_at: String,
    #[serde(skip)]
    position: PurchasePosition,
}

impl From<Purchase> for ProductPurchase {
    fn from(purchase: Purchase) -> Self {
        Self {
            purchase_no: purchase.receipt.purchase_no().to_string(),
            user_id: purchase.buyer.to_string(),
            purchased_at: time_text(purchase.receipt.at),
            position: purchase.position(),
        }
    }
}

/// List the purchases of a product.
///
/// Lists who bought, in order of time: a page, or with `Accept: text/csv` all of them, with the header line
/// `purchaseNo,userId,purchasedAt`. A CSV that cannot be read to its end is cut off without the end of the response.
#[utoipa::path(
    get,
    path = "/api/v1/products/{sku}/purchases",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product."), PageQuery),
    responses(
        (
            status = 200,
            description = "A page of purchases, or all of them as CSV.",
            content((Success<Page<ProductPurchase>> = "application/json"), (String = "text/csv")),
        ),
        (status = 404, description = "There is no such product."),
    ),
)]
pub(crate) async fn list_product_purchases(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    sku: PathParam,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    let Query(query) = query.map_err(|problem| SaleError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let after = query.cursor.as_deref().map(parse_cursor).transpose()?;
    let product = app.sale.product(&sku).await?.ok_or_else(unknown_product)?;
    if accepts_csv(&headers) {
        return write_csv(app, product).await;
    }
    let purchases = app.sale.purchases(&product, after, limit + 1).await?;
    let items: Vec<ProductPurchase> = purchases.into_iter().map(ProductPurchase::from).collect();
    let page = Page::cut(items, limit, |item| cursor(item.position));
    Ok(([(CACHE_CONTROL, "no-store")], success(page)).into_response())
}

/// Reads the first page before the response begins, so that a store that is down is answered as usual.
async fn write_csv(app: Arc<App>, product: Product) -> Result<Response, SaleError> {
    let first = app.sale.purchases(&product, None, CSV_PAGE).await?;
    let rest = stream::unfold((Some(first), None, app, product), |(read, after, app, product)| async move {
        let purchases = match read {
            Some(purchases) => purchases,
            None => match app.sale.purchases(&product, Some(after?), CSV_PAGE).await {
                Ok(purchases) => purchases,
                Err(error) => return Some((Err(end_early(&error)), (None, None, app, product))),
            },
        };
        let is_last = purchases.len() < CSV_PAGE;
        let next = purchases.last().filter(|_| !is_last).map(Purchase::position);
        let mut lines = if after.is_none() { CSV_HEADER.to_owned() } else { String::new() };
        purchases.into_iter().for_each(|purchase| write_line(&mut lines, &purchase.into()));
        Some((Ok(Bytes::from(lines)), (None, next, app, product)))
    });
    let mut response = Response::new(Body::from_stream(rest));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/csv; charset=utf-8"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn end_early(error: &Error) -> io::Error {
    io::Error::other(error.with_causes().to_string())
}

fn write_line(lines: &mut String, purchase: &ProductPurchase) {
    let ProductPurchase { purchase_no, user_id, purchased_at, .. } = purchase;
    let needs_quotes = user_id.contains([',', '"', '\n', '\r']) || user_id.trim() != user_id;
    let user_id =
        if needs_quotes { format!("\"{}\"", user_id.replace('"', "\"\"")) } else { user_id.clone() };
    lines.extend([purchase_no, ",", &user_id, ",", purchased_at, "\n"]);
}

fn accepts_csv(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut types = accepted.flat_map(|value| value.split(',')).filter_map(|range| range.split(';').next());
    types.any(|media_type| media_type.trim().eq_ignore_ascii_case("text/csv"))
}

fn cursor(position: PurchasePosition) -> String {
    format!("{}-{}", position.at.as_micros(), position.number)
}

fn parse_cursor(text: &str) -> Result<PurchasePosition, SaleError> {
    let position = || {
        let (at, number) = text.split_once('-')?;
        let at = at.parse().ok().filter(|at| (0..=LATEST_US).contains(at))?;
        Some(PurchasePosition { at: Timestamp::from_micros(at), number: number.parse().ok()? })
    };
    position().ok_or_else(|| {
        let problem = "must be the nextCursor of the page before".to_owned();
        SaleError::invalid_fields(vec![("cursor", problem)], None)
    })
}

/// The end of the year 9999, the last one that every store can compare with.
const LATEST_US: i64 = 253_402_300_799_000_000;

#[cfg(test)]
mod tests {
    use weir_core::UserId;
    use weir_core::sale::PurchaseReceipt;
    use weir_store::sale::ProductId;

    use super::*;

    fn line(buyer: &str) -> String {
        let receipt = PurchaseReceipt { number: 7, at: Timestamp::from_seconds(1_771_149_600) };
        let purchase = Purchase { product: ProductId(1), buyer: UserId::parse(buyer).unwrap(), receipt };
        let mut lines = String::new();
        write_line(&mut lines, &purchase.into());
        lines
    }

    #[test]
    fn a_line_quotes_what_would_end_its_field() {
        assert_eq!(line("a@b.c"), "PUR-20260215-0007,a@b.c,2026-02-15T10:00:00.000Z\n");
        assert_eq!(line("a,\"b\""), "PUR-20260215-0007,\"a,\"\"b\"\"\",2026-02-15T10:00:00.000Z\n");
    }

    #[test]
    fn a_cursor_is_parsed_as_it_is_written_and_nothing_else_is() {
        let position = PurchasePosition { at: Timestamp::from_micros(12), number: 3 };
        assert_eq!(parse_cursor(&cursor(position)).unwrap(), position);
        for bad in ["", "1", "-1-1", "1-x", "1--1", "99999999999999999999-1", "9223372036854775807-1"] {
            assert!(parse_cursor(bad).is_err(), "{bad}");
        }
    }
}
