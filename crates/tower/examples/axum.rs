//! A service that limits its callers itself: five logins a minute for each address, without a Weir server.
//!
//!     cargo run -p weir-tower --example axum
//!     for i in 1 2 3 4 5 6; do curl -si http://127.0.0.1:3000/login | grep -i -e ^HTTP -e ratelimit; done

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::routing::get;
use weir_tower::{LimitLayer, Policy};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let by_address = |request: &Request| {
        let caller = request.extensions().get::<ConnectInfo<SocketAddr>>()?;
        Some(caller.0.ip().to_string())
    };
    let logins = Policy::token_bucket("login", 5, 5, Duration::from_secs(60))?;
    let app = Router::new()
        .route("/login", get(async || "welcome\n").layer(LimitLayer::new(logins, by_address)))
        .route("/", get(async || "not limited\n"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
