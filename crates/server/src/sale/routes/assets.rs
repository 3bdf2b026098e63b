//! The sale page: `/sale/` for shoppers, `/sale/admin.html` for the operator. Its files are embedded in the binary if they
//! existed when it was built. Otherwise a small page explains how to build them.

use axum::extract::RawQuery;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY};
use http::{HeaderName, StatusCode};

use crate::http::extract::PathParam;

/// Paths below `web/dist`, and contents, in order of path.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/page.rs"));
const MISSING: &str = include_str!("../../../assets/no-sale-page.html");

/// Everything is loaded from this server, and no string is executed as code.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

const REVALIDATE: &str = "no-cache";
/// For files whose names change with their contents.
const FOR_EVER: &str = "public, max-age=31536000, immutable";

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
pub(crate) async fn get_page() -> Response {
    file("index.html").unwrap_or_else(|| respond("index.html", REVALIDATE, MISSING.as_bytes()))
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
pub(crate) async fn get_page_file(PathParam(name): PathParam) -> Response {
    name.ok().and_then(|name| file(&name)).unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
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
    name.ok()
        .and_then(|name| file(&format!("assets/{name}")))
        .unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}

fn file(name: &str) -> Option<Response> {
    let index = FILES.binary_search_by_key(&name, |(name, _)| name).ok()?;
    let (name, content) = FILES.get(index)?;
    let caching = if name.starts_with("assets/") { FOR_EVER } else { REVALIDATE };
    Some(respond(name, caching, content))
}

fn respond(name: &str, caching: &'static str, content: &'static [u8]) -> Response {
    let headers: [(HeaderName, &str); 4] = [
        (CONTENT_TYPE, content_type(name)),
        (CACHE_CONTROL, caching),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, content).into_response()
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_only_by_their_exact_names() {
        assert!(FILES.is_sorted_by_key(|(name, _)| name));
        for (name, content) in FILES {
            let found = file(name).unwrap();
            assert_eq!(found.headers()[CONTENT_SECURITY_POLICY], POLICY);
            assert!(!content.is_empty() && content_type(name) != "application/octet-stream", "{name}");
        }
        for other in ["", "../Cargo.toml", "assets/", "assets/../index.html", "/index.html", "INDEX.HTML"] {
            assert!(file(other).is_none(), "{other}");
        }
    }
}
