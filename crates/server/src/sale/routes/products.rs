//! HTTP routes of products, for the operator: `/api/v1/products`.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use weir_core::Timestamp;
use weir_core::sale::{ChangeError, EndReason, Sku, Stock, Terms, TermsChange, TermsError};
use weir_store::sale::{ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome, Product};

use super::{Outcome, Success, success, time_text};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::http::sale_error::SaleError;
use crate::sale::events::{ProductChanged, ProductCreated, ProductDeleted, SaleEnded, SaleExtended};

/// A new product and its sale. Handlers read the body field by field, so that one response lists all invalid fields; this
/// type is for the OpenAPI document.
#[derive(ToSchema)]
#[schema(
    rename_all = "camelCase",
    examples(json!({
        "sku": "WIDGET-001",
        "productName": "Limited Edition Widget",
        "initialStock": 100,
        "startTime": "2030-02-15T10:00:00.000Z",
        "endTime": "2030-02-15T10:30:00.000Z"
    }))
)]
#[expect(dead_code, reason = "only the OpenAPI document uses it")]
struct ProductRequest {
    #[schema(value_type = schema::Sku)]
    sku: String,
    #[schema(value_type = schema::ProductName)]
    product_name: String,
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    initial_stock: u32,
    /// When the sale begins. Must be in the future.
    #[schema(value_type = schema::Time)]
    start_time: String,
    /// When the sale ends. Must be after `startTime`.
    #[schema(value_type = schema::Time)]
    end_time: String,
}

/// The fields to change. Fields that are left out keep their value.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase", examples(json!({"initialStock": 200})))]
#[expect(dead_code, reason = "only the OpenAPI document uses it")]
struct ProductChange {
    #[schema(
        required = false,
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\u0000-\u001F\u007F-\u009F]+$"
    )]
    product_name: String,
    #[schema(required = false, minimum = 1, maximum = 2_147_483_647)]
    initial_stock: u32,
    /// When the sale begins. Must be in the future.
    #[schema(required = false, value_type = schema::Time)]
    start_time: String,
    /// When the sale ends. Must be after `startTime`.
    #[schema(required = false, value_type = schema::Time)]
    end_time: String,
}

/// A later end of a sale.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase", examples(json!({"endTime": "2030-02-15T11:00:00.000Z"})))]
#[expect(dead_code, reason = "only the OpenAPI document uses it")]
struct SaleExtension {
    /// When the sale ends. Must be later than its present end.
    #[schema(value_type = schema::Time)]
    end_time: String,
}

/// A product and its sale.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Product)]
struct ProductResponse {
    #[schema(value_type = schema::Sku)]
    sku: String,
    #[schema(value_type = schema::ProductName)]
    product_name: String,
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(100))]
    initial_stock: u32,
    /// Units left. Not when a product is created or changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, examples(87))]
    current_stock: Option<u32>,
    #[schema(format = DateTime)]
    start_time: String,
    #[schema(format = DateTime)]
    end_time: String,
    #[schema(value_type = schema::SaleState)]
    state: &'static str,
    /// Why the sale has ended; only then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = schema::EndReason, required = false)]
    end_reason: Option<&'static str>,
    /// Units sold. Not when a product is created or changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, examples(13))]
    total_purchases: Option<u32>,
    #[schema(format = DateTime)]
    created_at: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ProductReset)]
struct ResetResponse {
    #[schema(examples("Product WIDGET-001 and all associated sale data have been reset."))]
    message: String,
}

/// Create a product.
///
/// Creates a product and its sale, which must begin in the future.
#[utoipa::path(
    post,
    path = "/api/v1/products",
    tag = "sale",
    request_body = ProductRequest,
    responses((status = 201, description = "The product.", body = Success<ProductResponse>)),
)]
pub(crate) async fn create_product(
    State(app): State<Arc<App>>,
    body: Result<Json<Map<String, Value>>, ApiError>,
) -> Result<Response, SaleError> {
    let Json(body) = body?;
    let (sku, terms) = parse_product(&body)?;
    match app.sale.create(&sku, terms).await? {
        CreateOutcome::Created(product) => {
            ProductCreated { product: &product }.emit();
            Ok((StatusCode::CREATED, success(describe(product))).into_response())
        }
        CreateOutcome::Exists => {
            Err(SaleError::invalid_fields(vec![("sku", "exists already".to_owned())], None))
        }
        CreateOutcome::Refused(problem) => Err(wrong_terms(problem)),
    }
}

/// List products.
///
/// Lists all products in order of sku.
#[utoipa::path(
    get,
    path = "/api/v1/products",
    tag = "sale",
    params(PageQuery),
    responses((status = 200, description = "A page of products.", body = Success<Page<ProductResponse>>)),
)]
pub(crate) async fn list_products(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let Query(query) = query.map_err(|problem| SaleError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let wrong = |problem| SaleError::invalid_fields(vec![("cursor", format!("{problem}"))], None);
    let after = query.cursor.map(Sku::parse).transpose().map_err(wrong)?;
    let products = app.sale.products(after.as_ref(), limit + 1).await?;
    let items = products.into_iter().map(describe_with_stock).collect();
    Ok(success(Page::cut(items, limit, |product| product.sku.clone())).into_response())
}

/// Read a product.
///
/// Returns a product, its stock and the number of units sold.
#[utoipa::path(
    get,
    path = "/api/v1/products/{sku}",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product.")),
    responses(
        (status = 200, description = "The product.", body = Success<ProductResponse>),
        (status = 404, description = "There is no such product."),
    ),
)]
pub(crate) async fn get_product(State(app): State<Arc<App>>, sku: PathParam) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    let product = app.sale.product(&sku).await?.ok_or_else(unknown_product)?;
    Ok(success(describe_with_stock(product)).into_response())
}

/// Change a product.
///
/// Changes the fields in the body, if the sale has not begun.
#[utoipa::path(
    put,
    path = "/api/v1/products/{sku}",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product.")),
    request_body = ProductChange,
    responses(
        (
            status = 200,
            description = "The changed product, or `SALE_NOT_MODIFIABLE` if its sale has begun or ended.",
            body = Outcome<ProductResponse>,
        ),
        (status = 404, description = "There is no such product."),
    ),
)]
pub(crate) async fn change_product(
    State(app): State<Arc<App>>,
    sku: PathParam,
    body: Result<Json<Map<String, Value>>, ApiError>,
) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    let Json(body) = body?;
    let mut fields = ProductFields { body: &body, wrong: Vec::new() };
    let change = fields.change();
    fields.finish()?;
    let before = app.sale.product(&sku).await?;
    match app.sale.change(&sku, change).await? {
        ChangeOutcome::Changed(product) => {
            ProductChanged { product: &product, before: before.as_ref() }.emit();
            Ok(success(describe(product)).into_response())
        }
        ChangeOutcome::Refused(ChangeError::Terms(problem)) => Err(wrong_terms(problem)),
        ChangeOutcome::Refused(ChangeError::NotModifiable) => {
            let message = "Cannot modify product while sale is active or ended.";
            Err(SaleError::refusal("SALE_NOT_MODIFIABLE", message))
        }
        ChangeOutcome::UnknownSku => Err(unknown_product()),
    }
}

/// Reset a product.
///
/// Deletes a product and all its purchases. The sku can be used again. Meant for development and tests: unless
/// `sale.allow_reset` is on, a product that is active or has purchases stays.
#[utoipa::path(
    delete,
    path = "/api/v1/products/{sku}",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product.")),
    responses(
        (status = 200, description = "Deleted.", body = Success<ResetResponse>),
        (status = 404, description = "There is no such product."),
        (status = 409, description = "`RESET_DISABLED`: the product is active or has purchases."),
    ),
)]
pub(crate) async fn delete_product(
    State(app): State<Arc<App>>,
    sku: PathParam,
) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    let before = app.sale.product(&sku).await?;
    match app.sale.delete(&sku).await? {
        DeleteOutcome::Deleted => {}
        DeleteOutcome::UnknownSku => return Err(unknown_product()),
        DeleteOutcome::InUse => {
            let message =
                "The product is active or has purchases. To delete it all the same, set sale.allow_reset.";
            return Err(SaleError::conflict("RESET_DISABLED", message));
        }
    }
    ProductDeleted { sku: &sku, before: before.as_ref() }.emit();
    let message = format!("Product {sku} and all associated sale data have been reset.");
    Ok(success(ResetResponse { message }).into_response())
}

/// End a sale.
///
/// Ends an active sale at once and for ever. Buyers are refused with `SALE_NOT_ACTIVE` from then on.
#[utoipa::path(
    post,
    path = "/api/v1/products/{sku}/end",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product.")),
    responses(
        (
            status = 200,
            description = "The product, or `SALE_NOT_ACTIVE` if its sale has not begun or has ended.",
            body = Outcome<ProductResponse>,
        ),
        (status = 404, description = "There is no such product."),
    ),
)]
pub(crate) async fn end_sale(State(app): State<Arc<App>>, sku: PathParam) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    match app.sale.end(&sku).await? {
        EndOutcome::Ended(product) => {
            SaleEnded { product: &product }.emit();
            Ok(success(describe_with_stock(product)).into_response())
        }
        EndOutcome::NotActive => Err(SaleError::refusal("SALE_NOT_ACTIVE", "The sale is not active.")),
        EndOutcome::UnknownSku => Err(unknown_product()),
    }
}

/// Extend a sale.
///
/// Moves the end of a sale that has not ended to a later time.
#[utoipa::path(
    post,
    path = "/api/v1/products/{sku}/extend",
    tag = "sale",
    params(("sku" = schema::Sku, Path, description = "The sku of the product.")),
    request_body = SaleExtension,
    responses(
        (
            status = 200,
            description = "The product, or `SALE_NOT_MODIFIABLE` if its sale has ended.",
            body = Outcome<ProductResponse>,
        ),
        (status = 404, description = "There is no such product."),
    ),
)]
pub(crate) async fn extend_sale(
    State(app): State<Arc<App>>,
    sku: PathParam,
    body: Result<Json<Map<String, Value>>, ApiError>,
) -> Result<Response, SaleError> {
    let sku = parse_path(sku)?;
    let Json(body) = body?;
    let mut fields = ProductFields { body: &body, wrong: Vec::new() };
    let end = fields.time("endTime");
    fields.require("endTime");
    fields.finish()?;
    let end = end.ok_or_else(|| SaleError::invalid("The extension is incomplete."))?;
    let before = app.sale.product(&sku).await?;
    match app.sale.extend(&sku, end).await? {
        ChangeOutcome::Changed(product) => {
            SaleExtended { product: &product, before: before.as_ref() }.emit();
            Ok(success(describe_with_stock(product)).into_response())
        }
        ChangeOutcome::Refused(ChangeError::Terms(problem)) => Err(wrong_terms(problem)),
        ChangeOutcome::Refused(ChangeError::NotModifiable) => {
            Err(SaleError::refusal("SALE_NOT_MODIFIABLE", "Cannot extend a sale that has ended."))
        }
        ChangeOutcome::UnknownSku => Err(unknown_product()),
    }
}

/// The fields of a body, and the errors found in them so far.
struct ProductFields<'a> {
    body: &'a Map<String, Value>,
    wrong: Vec<(&'static str, String)>,
}

impl ProductFields<'_> {
    fn text(&mut self, field: &'static str) -> Option<&str> {
        let value = self.body.get(field)?;
        if value.as_str().is_none() {
            self.wrong.push((field, "must be a string".to_owned()));
        }
        value.as_str()
    }

    fn time(&mut self, field: &'static str) -> Option<Timestamp> {
        let value = self.body.get(field)?;
        let time = value.as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
        let time = time.map(|time| Timestamp::from_micros(time.as_microsecond()));
        let time = time.filter(|time| *time < LATEST);
        if time.is_none() {
            self.wrong.push((field, "must be an ISO 8601 time such as 2026-01-01T12:00:00.000Z".to_owned()));
        }
        time
    }

    fn stock(&mut self) -> Option<u32> {
        let value = self.body.get("initialStock")?;
        let units = value.as_u64().and_then(|units| u32::try_from(units).ok());
        let units = units.filter(|units| Stock::new(*units).is_ok());
        if units.is_none() {
            self.wrong.push(("initialStock", TermsError::InitialStock.to_string()));
        }
        units
    }

    /// Parses the fields of a change and checks each that can be checked without the others.
    fn change(&mut self) -> TermsChange {
        let product_name = self.text("productName").map(str::to_owned);
        if let Some(name) = &product_name
            && Terms::new(name, 1, Timestamp::EPOCH, LATEST) == Err(TermsError::ProductName)
        {
            self.wrong.push(("productName", TermsError::ProductName.to_string()));
        }
        let initial_stock = self.stock();
        let (start, end) = (self.time("startTime"), self.time("endTime"));
        if let (Some(start), Some(end)) = (start, end)
            && end <= start
        {
            self.wrong.push(("endTime", TermsError::EndTime.to_string()));
        }
        TermsChange { product_name, initial_stock, start, end }
    }

    fn require(&mut self, field: &'static str) {
        if !self.body.contains_key(field) {
            self.wrong.push((field, "is required".to_owned()));
        }
    }

    fn finish(self) -> Result<(), SaleError> {
        if self.wrong.is_empty() { Ok(()) } else { Err(SaleError::invalid_fields(self.wrong, None)) }
    }
}

/// The end of the year 9998: leaves room for arithmetic with times.
const LATEST: Timestamp = Timestamp::from_seconds(253_370_764_800);

fn parse_product(body: &Map<String, Value>) -> Result<(Sku, Terms), SaleError> {
    let mut fields = ProductFields { body, wrong: Vec::new() };
    let sku = fields.text("sku").map(Sku::parse);
    if let Some(Err(problem)) = &sku {
        fields.wrong.push(("sku", problem.to_string()));
    }
    let TermsChange { product_name, initial_stock, start, end } = fields.change();
    for field in ["sku", "productName", "initialStock", "startTime", "endTime"] {
        fields.require(field);
    }
    fields.finish()?;
    let incomplete = || SaleError::invalid("The product is incomplete.");
    let sku = sku.and_then(Result::ok).ok_or_else(incomplete)?;
    let terms = Terms::new(
        product_name.as_deref().ok_or_else(incomplete)?,
        initial_stock.ok_or_else(incomplete)?,
        start.ok_or_else(incomplete)?,
        end.ok_or_else(incomplete)?,
    );
    Ok((sku, terms.map_err(wrong_terms)?))
}

fn wrong_terms(problem: TermsError) -> SaleError {
    let field = match problem {
        TermsError::ProductName => "productName",
        TermsError::InitialStock => "initialStock",
        TermsError::StartTime => "startTime",
        TermsError::EndTime | TermsError::NotExtended => "endTime",
    };
    SaleError::invalid_fields(vec![(field, problem.to_string())], None)
}

/// Parses the sku in the path. An invalid sku is an unknown product.
pub(super) fn parse_path(path: PathParam) -> Result<Sku, SaleError> {
    path.0.ok().and_then(|text| Sku::parse(text).ok()).ok_or_else(unknown_product)
}

pub(super) fn unknown_product() -> SaleError {
    SaleError::not_found("There is no such product.")
}

fn describe(product: Product) -> ProductResponse {
    let (terms, created_at) = (&product.sale.terms, time_text(product.created_at));
    ProductResponse {
        sku: product.sku.to_string(),
        product_name: terms.product_name.to_string(),
        initial_stock: terms.initial_stock.get(),
        current_stock: None,
        start_time: time_text(terms.start),
        end_time: time_text(terms.end),
        state: product.sale.state.as_str(),
        end_reason: product.sale.state.end_reason().map(EndReason::as_str),
        total_purchases: None,
        created_at,
    }
}

fn describe_with_stock(product: Product) -> ProductResponse {
    let (stock, sold) = (product.sale.stock(), product.sale.sold);
    ProductResponse { current_stock: Some(stock), total_purchases: Some(sold), ..describe(product) }
}
