//! The HTTP API that turns faults on and off while the proxy runs.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get};
use serde::Serialize;

use super::catalog;
use super::proxy::Proxy;
use super::spec::{parse_all, parse_some};

pub(super) fn router(proxy: Arc<Proxy>) -> Router {
    let faults = get(async |State(proxy): State<Arc<Proxy>>| json(&proxy.active.rows()))
        .post(async |State(proxy): State<Arc<Proxy>>, body: String| set(&proxy, &body, false))
        .put(async |State(proxy): State<Arc<Proxy>>, body: String| set(&proxy, &body, true))
        .delete(async |State(proxy): State<Arc<Proxy>>| {
            proxy.active.replace(Vec::new());
            StatusCode::NO_CONTENT
        });
    let unknown = async || (StatusCode::NOT_FOUND, "there is /faults, /faults/ID, /catalog and /healthz\n");
    Router::new()
        .route("/faults", faults)
        .route("/faults/{id}", delete(remove))
        .route("/catalog", get(async || json(&catalog::all())))
        .route("/healthz", get(async || "ok\n"))
        .route("/{*rest}", get(unknown))
        .with_state(proxy)
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string_pretty(value) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// On a mistake in any of them nothing changes.
fn set(proxy: &Proxy, text: &str, replaces: bool) -> Response {
    let specs = if replaces { parse_all(text) } else { parse_some(text) };
    match specs {
        Ok(specs) => {
            let added = match replaces {
                true => proxy.active.replace(specs),
                false => proxy.active.add(specs),
            };
            json(&added)
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn remove(State(proxy): State<Arc<Proxy>>, Path(id): Path<u64>) -> Response {
    match proxy.active.remove(id) {
        true => StatusCode::NO_CONTENT.into_response(),
        false => {
            (StatusCode::NOT_FOUND, format!("no fault {id} is on: GET /faults lists them\n")).into_response()
        }
    }
}
