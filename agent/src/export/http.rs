//! HTTP server of the agent: metrics, rooms, findings, health, status, and pages for people (`page`). Read only.
//!
//! It has no authentication: it listens where it is told to, by default on loopback. Everything a client can
//! ask for is bounded: connections, size and time of a request, rooms per answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::SizeAbove;

use super::counters::{Counters, Reason, Signal};
use super::metrics::{MetricsSnapshot, Source};
use super::process::Process;
use super::prometheus::{Format, PhaseDurations, encode};
use super::query::{Key, PAGE_MAX, QueryError, QueryHandle, RoomsFilter};
use super::record::Maker;
use super::{ExportError, Identity, page};
use crate::accept::accept;
use crate::rooms::model::RoomSnapshot;
use crate::verdict::model::Finding;

/// Clients at once.
const CONNECTIONS: usize = 64;

/// Size of a request's head. hyper takes no less than 8 KiB.
const HEAD: usize = 16 << 10;

/// Time for a request's head to arrive.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Time for an answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Rooms per page when the client does not say.
const PAGE: usize = 100;

/// The pipeline publishes about once a second; after this long without, something holds it.
pub(super) const STALLED: Duration = Duration::from_secs(30);

/// What the pipeline published last, and when.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) at: Instant,
    pub(super) snapshot: Option<Arc<MetricsSnapshot>>,
}

/// Everything the answers are made of.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) identity: Arc<Identity>,
    pub(super) queries: QueryHandle,
    pub(super) published: watch::Receiver<Published>,
    /// Ready, or why not yet.
    pub(super) ready: watch::Receiver<Result<(), String>>,
    pub(super) durations: PhaseDurations,
    pub(super) counters: Arc<Counters>,
}

/// Takes the address.
///
/// # Errors
/// [`ExportError::Listen`].
pub(super) async fn bind(listen: SocketAddr) -> Result<TcpListener, ExportError> {
    TcpListener::bind(listen).await.map_err(|source| ExportError::Listen { listen, source })
}

/// Serves until `stop` changes or its sender goes away.
pub(super) async fn serve(listener: TcpListener, answers: Arc<Answers>, stop: watch::Receiver<bool>) {
    let app = router(answers);
    let stopped = stop.clone();
    accept(listener, CONNECTIONS, stop, || {}, |stream| connection(stream, app.clone(), stopped.clone()))
        .await;
}

async fn connection(stream: TcpStream, app: Router, mut stop: watch::Receiver<bool>) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    tokio::pin!(connection);
    // A client's broken connection is its own affair, so results are not looked at.
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(Duration::from_secs(1), connection).await;
        }
    }
}

fn router(answers: Arc<Answers>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/api/v1/rooms", get(rooms))
        .route("/api/v1/rooms/{room}", get(room))
        .route("/api/v1/findings", get(findings))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .merge(page::routes())
        .fallback(|| async { error(StatusCode::NOT_FOUND, "no such page") })
        .method_not_allowed_fallback(|| async { error(StatusCode::METHOD_NOT_ALLOWED, "only GET is served") })
        .layer(smaller())
        .layer(middleware::from_fn(in_time))
        .with_state(answers)
}

/// Answers compressed (gzip) for clients that ask for it: over a slow link most of an answer's time is its bytes.
fn smaller() -> CompressionLayer<SizeAbove> {
    // Smaller answers fit in one packet as they are.
    CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(SizeAbove::new(1 << 10))
}

async fn in_time(request: Request, next: Next) -> Response {
    let answer = tokio::time::timeout(ANSWER_TIME, next.run(request)).await;
    answer.unwrap_or_else(|_| error(StatusCode::SERVICE_UNAVAILABLE, "the answer took too long"))
}

fn error(status: StatusCode, what: &str) -> Response {
    (status, Json(json!({ "error": what }))).into_response()
}

fn busy(e: QueryError) -> Response {
    error(StatusCode::SERVICE_UNAVAILABLE, &e.to_string())
}

async fn metrics(State(a): State<Arc<Answers>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok());
    let format = Format::accepted(accept);
    let source = Source {
        snapshot: a.published.borrow().snapshot.clone(),
        counters: Arc::clone(&a.counters),
        process: Process::read(),
    };
    match encode(source, &a.durations, format) {
        Ok(text) => ([(header::CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "metrics could not be encoded"),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RoomsParameters {
    pinned: Option<bool>,
    closed: Option<bool>,
    overdue: Option<bool>,
    limit: Option<usize>,
    /// `next` of the page before.
    after: Option<String>,
}

async fn rooms(
    State(a): State<Arc<Answers>>,
    parameters: Result<Query<RoomsParameters>, QueryRejection>,
) -> Response {
    let filter = match parameters.map_err(|e| e.body_text()).and_then(|Query(p)| filter(&p)) {
        Ok(filter) => filter,
        Err(what) => return error(StatusCode::BAD_REQUEST, &what),
    };
    let page = match a.queries.rooms(filter).await {
        Ok(page) => page,
        Err(e) => return busy(e),
    };
    let maker = Maker { identity: &a.identity, clock: &page.clock };
    let records: Vec<_> = page.rooms.iter().map(|r| maker.room(r)).collect();
    let last = page.rooms.last().filter(|_| page.more);
    let next = last.map(|r| format!("{}.{}", r.room, r.incarnation));
    Json(json!({ "rooms": records, "next": next })).into_response()
}

fn filter(p: &RoomsParameters) -> Result<RoomsFilter, String> {
    let limit = p.limit.unwrap_or(PAGE);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(format!("limit must be from 1 to {PAGE_MAX}"));
    }
    let after = p.after.as_deref().map(|a| key(a).ok_or("after must be the `next` of another page"));
    if p.closed == Some(true) && p.pinned.is_some() {
        return Err("closed rooms are not pinned: leave pinned out".to_owned());
    }
    let overdue = p.overdue == Some(true);
    if overdue && (p.closed == Some(true) || p.pinned == Some(true)) {
        return Err("overdue lists open rooms that are not pinned: leave closed and pinned out".to_owned());
    }
    let after = after.transpose()?;
    Ok(RoomsFilter { pinned: p.pinned, closed: p.closed == Some(true), overdue, after, limit })
}

fn key(text: &str) -> Option<Key> {
    let (room, incarnation) = text.split_once('.')?;
    Some((room.parse().ok()?, incarnation.parse().ok()?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RoomParameters {
    /// Which use of the number; without it the newest.
    incarnation: Option<u32>,
}

async fn room(
    State(a): State<Arc<Answers>>,
    number: Result<Path<String>, PathRejection>,
    parameters: Result<Query<RoomParameters>, QueryRejection>,
) -> Response {
    let (number, incarnation) = match asked(number, parameters) {
        Ok(asked) => asked,
        Err(what) => return error(StatusCode::BAD_REQUEST, &what),
    };
    let found = match a.queries.room(number).await {
        Ok(found) => found,
        Err(e) => return busy(e),
    };
    let Some(r) = chosen(&found.rooms, incarnation) else {
        return error(StatusCode::NOT_FOUND, &not_known(number));
    };
    Json(Maker { identity: &a.identity, clock: &found.clock }.room(r)).into_response()
}

/// Which room is asked for, and which use of its number.
///
/// # Errors
/// What is wrong with the question.
pub(super) fn asked(
    number: Result<Path<String>, PathRejection>,
    parameters: Result<Query<RoomParameters>, QueryRejection>,
) -> Result<(u64, Option<u32>), String> {
    let number = number.ok().and_then(|Path(n)| n.parse::<u64>().ok());
    let number = number.ok_or("a room is a number from 0 to 18446744073709551615")?;
    let Query(parameters) = parameters.map_err(|e| e.body_text())?;
    Ok((number, parameters.incarnation))
}

/// Of the uses of a number the one asked for, else the newest.
pub(super) fn chosen(rooms: &[RoomSnapshot], incarnation: Option<u32>) -> Option<&RoomSnapshot> {
    let wanted = |r: &&RoomSnapshot| incarnation.is_none_or(|i| r.incarnation == i);
    rooms.iter().filter(wanted).max_by_key(|r| r.incarnation)
}

pub(super) fn not_known(number: u64) -> String {
    format!("room {number} is not known here: no control message of it was seen, or it is forgotten")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FindingsParameters {
    limit: Option<usize>,
}

async fn findings(
    State(a): State<Arc<Answers>>,
    parameters: Result<Query<FindingsParameters>, QueryRejection>,
) -> Response {
    let limit = match parameters {
        Ok(Query(p)) => p.limit.unwrap_or(PAGE),
        Err(e) => return error(StatusCode::BAD_REQUEST, &e.body_text()),
    };
    if !(1..=PAGE_MAX).contains(&limit) {
        return error(StatusCode::BAD_REQUEST, &format!("limit must be from 1 to {PAGE_MAX}"));
    }
    let found = match a.queries.findings(limit).await {
        Ok(found) => found,
        Err(e) => return busy(e),
    };
    let maker = Maker { identity: &a.identity, clock: &found.clock };
    let records = |list: &[Finding]| list.iter().map(|f| maker.finding(f, found.at)).collect::<Vec<_>>();
    Json(json!({
        "findings": records(&found.open),
        "total": found.total,
        "closed": records(newest(&found.closed, limit)),
    }))
    .into_response()
}

/// The last of those that are over, as many as of those that are open.
fn newest(closed: &[Finding], limit: usize) -> &[Finding] {
    closed.get(closed.len().saturating_sub(limit)..).unwrap_or_default()
}

async fn healthz(State(a): State<Arc<Answers>>) -> Response {
    let silent = a.published.borrow().at.elapsed();
    if silent < STALLED {
        return Json(json!({ "healthy": true })).into_response();
    }
    let what = format!("the thread that follows the rooms has not reported for {} s", silent.as_secs());
    error(StatusCode::SERVICE_UNAVAILABLE, &what)
}

async fn readyz(State(a): State<Arc<Answers>>) -> Response {
    match &*a.ready.borrow() {
        Ok(()) => Json(json!({ "ready": true })).into_response(),
        Err(why) => error(StatusCode::SERVICE_UNAVAILABLE, why),
    }
}

async fn status(State(a): State<Arc<Answers>>) -> Response {
    match a.queries.status().await {
        Ok(mut status) => {
            if let Some(fields) = status.as_object_mut() {
                fields.insert("export".to_owned(), export_status(&a.counters));
            }
            Json(status).into_response()
        }
        Err(e) => busy(e),
    }
}

/// Per signal what left and what did not.
fn export_status(counters: &Counters) -> serde_json::Value {
    let of = |signal: Signal| {
        let dropped: serde_json::Map<_, _> =
            Reason::ALL.iter().map(|r| (r.label().to_owned(), counters.dropped(signal, *r).into())).collect();
        json!({ "sent": counters.sent(signal), "dropped": dropped })
    };
    Signal::ALL.iter().map(|s| (s.label().to_owned(), of(*s))).collect()
}
