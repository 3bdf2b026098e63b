//! The sale page: `/sale/` for shoppers, `/sale/admin.html` for the operator. Its files, and the policy that they run under, are
//! those of `page.rs`. A binary without them serves a small page that explains how to build them.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::LOCATION;

use crate::app::App;
use crate::http::extract::PathParam;
use crate::http::page_files;

/// Be redirected to the sale page.
///
/// Leads to `/sale/`.
#[utoipa::path(
    get,
    path = "/sale",
    tag = "sale",
    responses(
        (
            status = 308,
            description = "To `/sale/`, with the same query.",
            headers(("Location" = String, description = "Where the page is.")),
        ),
    ),
)]
pub(crate) async fn redirect_to_page(RawQuery(query): RawQuery) -> Response {
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    (StatusCode::PERMANENT_REDIRECT, [(LOCATION, format!("/sale/{query}"))]).into_response()
}

/// Open the sale page.
///
/// The page for shoppers: `?sku=` selects a sale, otherwise it shows the current one. `/sale/admin.html` is for the operator. A
/// binary that was built without the page explains how to build it.
#[utoipa::path(
    get,
    path = "/sale/",
    tag = "sale",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html")),
)]
pub(crate) async fn get_page(State(app): State<Arc<App>>) -> Response {
    app.sale.page().index()
}

/// Get a file of the sale page.
///
/// Such as `admin.html`.
#[utoipa::path(
    get,
    path = "/sale/{file}",
    tag = "sale",
    params(("file" = String, Path, description = "A file's name.", example = "admin.html")),
    responses(
        (status = 200, description = "The file.", content((String = "text/html"), (String = "image/svg+xml"))),
        (status = 404, description = "There is no such file."),
    ),
)]
pub(crate) async fn get_page_file(PathParam(name): PathParam, State(app): State<Arc<App>>) -> Response {
    let file = name.ok().and_then(|name| app.sale.page().file(&name));
    file.unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}

/// Get an asset of the sale page.
///
/// Scripts, styles and pictures. Their names change with their contents, so they may be cached for ever.
#[utoipa::path(
    get,
    path = "/sale/assets/{file}",
    tag = "sale",
    params(("file" = String, Path, description = "A file's name.", example = "index.js")),
    responses(
        (
            status = 200,
            description = "The file.",
            content((String = "text/javascript"), (String = "text/css"), (String = "image/svg+xml")),
        ),
        (status = 404, description = "There is no such file."),
    ),
)]
pub(crate) async fn get_page_asset(PathParam(name): PathParam) -> Response {
    let file = name.ok().and_then(|name| page_files::find(&format!("assets/{name}")));
    file.unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}
