//! Every route, and the one layer around them.

use std::sync::Arc;

use axum::Router;
use axum::routing::{delete, get, post};

use super::{audit, dead_letters, envelope, error, operations, quota};
use crate::app::App;

/// The whole API.
pub fn router(app: Arc<App>) -> Router {
    let router = Router::new()
        // quota
        .route("/api/config", post(quota::configure_quota))
        .route("/api/config/{userId}", get(quota::get_quota).delete(quota::delete_quota))
        .route("/api/send", post(quota::send_message))
        // dead letters
        .route("/admin/dlq", get(dead_letters::list_dead_letters))
        .route("/admin/dlq/replay", post(dead_letters::replay_all_dead_letters))
        .route("/admin/dlq/{id}", delete(dead_letters::discard_dead_letter))
        .route("/admin/dlq/{id}/replay", post(dead_letters::replay_dead_letter))
        // operations
        .route("/admin/audit", get(audit::audit_books))
        .merge(operations_routes());
    finish(router, app)
}

/// What a process without the API role still answers: whether it lives.
pub fn operations_router(app: Arc<App>) -> Router {
    finish(operations_routes(), app)
}

fn operations_routes() -> Router<Arc<App>> {
    Router::new()
        .route("/health", get(operations::get_health))
        .route("/livez", get(operations::get_livez))
        .route("/readyz", get(operations::get_readyz))
        .route("/metrics", get(operations::get_metrics))
        .route("/openapi.json", get(operations::get_openapi))
        .route("/docs", get(operations::get_docs))
        .route("/", get(operations::get_index))
}

/// The layer every request passes, whatever it asks for: see [`envelope`].
fn finish(router: Router<Arc<App>>, app: Arc<App>) -> Router {
    router
        .method_not_allowed_fallback(error::method_not_allowed)
        .fallback(error::not_found)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), envelope::envelope))
        .with_state(app)
}
