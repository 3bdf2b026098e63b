//! HTTP routes of sale: `/api/v1/sales`, and what all routes of sale share. Responses have an envelope of their own:
//! `{"success":true,"data":{…}}`, or `{"success":false,"error":{"code","message",…}}`. A refused purchase is such an error
//! with status 200: the request was valid.

pub(crate) mod anomalies;
pub(crate) mod assets;
pub(crate) mod events;
pub(crate) mod product_purchases;
pub(crate) mod products;
pub(crate) mod purchases;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::header::CACHE_CONTROL;
use jiff::fmt::temporal::DateTimePrinter;
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use weir_core::Timestamp;
use weir_core::sale::{EndReason, Sku};
use weir_queue::rfc3339;
use weir_store::sale::Product;

use crate::app::App;
use crate::http::body::Json;
use crate::http::openapi::schema;
use crate::http::sale_error::{SaleError, SaleErrorResponse};

/// The envelope of a success.
#[derive(Debug, Serialize, ToSchema)]
struct Success<T> {
    #[schema(schema_with = always_true)]
    success: bool,
    data: T,
}

/// A success or a refusal: check `success`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "handlers respond with one of the two; this type is for the OpenAPI document")]
enum Outcome<T> {
    Success(Success<T>),
    Refused(SaleErrorResponse),
}

fn always_true() -> Object {
    ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([true])).build()
}

fn success<T: Serialize>(data: T) -> Json<Success<T>> {
    Json(Success { success: true, data })
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SaleQuery {
    /// The sku of the sale.
    #[param(value_type = schema::Sku, required = false)]
    sku: Option<String>,
}

/// A sale, at most 100 ms old.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SaleStatus)]
struct SaleResponse {
    #[schema(value_type = schema::Sku)]
    sku: String,
    #[schema(value_type = schema::SaleState)]
    state: &'static str,
    /// Units left.
    #[schema(examples(87))]
    stock: u32,
    /// Units when the sale begins.
    #[schema(minimum = 1, examples(100))]
    initial_stock: u32,
    #[schema(value_type = schema::ProductName)]
    product_name: String,
    /// When the sale begins.
    #[schema(format = DateTime)]
    start_time: String,
    /// When the sale ends.
    #[schema(format = DateTime)]
    end_time: String,
    /// Why the sale has ended; null until then.
    #[schema(value_type = schema::EndReason, required = true)]
    end_reason: Option<&'static str>,
}

/// Read a sale.
///
/// Returns the state and the stock of a sale, from memory and at most 100 ms old. Without `sku`: the active sale, else the
/// next, else the last that ended. Caches may store the response for a second.
#[utoipa::path(
    get,
    path = "/api/v1/sales",
    tag = "sale",
    params(SaleQuery),
    responses(
        (
            status = 200,
            description = "The sale.",
            body = Success<SaleResponse>, headers(("Cache-Control" = String, description = "`public, max-age=1`")),
        ),
        (status = 404, description = "There is no such sale."),
    ),
)]
pub(crate) async fn get_sale(
    State(app): State<Arc<App>>,
    query: Result<Query<SaleQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let sku = parse_query(query)?;
    let product = app.sale.status(sku.as_ref()).await?.ok_or_else(unknown_sale)?;
    let Product { sku, sale, .. } = product;
    let body = success(SaleResponse {
        sku: sku.to_string(),
        state: sale.state.as_str(),
        stock: sale.stock(),
        initial_stock: sale.terms.initial_stock.get(),
        product_name: sale.terms.product_name.to_string(),
        start_time: time_text(sale.terms.start),
        end_time: time_text(sale.terms.end),
        end_reason: sale.state.end_reason().map(EndReason::as_str),
    });
    Ok(([(CACHE_CONTROL, "public, max-age=1")], body).into_response())
}

/// Parses the query. An invalid sku is an unknown sale.
fn parse_query(query: Result<Query<SaleQuery>, QueryRejection>) -> Result<Option<Sku>, SaleError> {
    let Query(query) = query.map_err(|problem| SaleError::invalid(problem.body_text()))?;
    query.sku.map(|sku| Sku::parse(sku).map_err(|_invalid| unknown_sale())).transpose()
}

fn unknown_sale() -> SaleError {
    SaleError::not_found("There is no such sale.")
}

const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));

/// Formats a time, always with milliseconds.
fn time_text(at: Timestamp) -> String {
    PRINTER.timestamp_to_string(&rfc3339(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds_even_if_they_are_zero() {
        assert_eq!(time_text(Timestamp::from_seconds(1_771_149_600)), "2026-02-15T10:00:00.000Z");
        assert_eq!(time_text(Timestamp::from_micros(1_771_149_601_234_999)), "2026-02-15T10:00:01.234Z");
    }
}
