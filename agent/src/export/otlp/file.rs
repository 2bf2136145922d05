//! OTLP JSON lines: the same spans and records, one request per line, as the Collector's file exporter writes
//! and its `otlpjsonfile` receiver reads them.

use std::path::Path;
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::logs::tonic::group_logs_by_resource_and_scope;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{LogBatch, SdkLogRecord};
use opentelemetry_sdk::trace::SpanData;

use super::spans::scope;
use crate::export::counters::{Counters, Signal};
use crate::export::events::{Lines, OpenError};

/// A line.
pub(super) enum Entry {
    Spans(Resource, Vec<SpanData>),
    Record(Resource, Box<SdkLogRecord>),
}

/// Opens the file and starts its writer.
///
/// # Errors
/// [`OpenError`].
pub(super) fn open(path: &Path, counters: Arc<Counters>) -> Result<Lines<Entry>, OpenError> {
    Lines::open(path, Signal::OtlpFile, counters, |entry, to| {
        let written = match entry {
            Entry::Spans(resource, spans) => write_spans(&resource, spans, to),
            Entry::Record(resource, record) => write_record(&resource, &record, to),
        };
        // Writing plain structs into memory does not fail.
        if written.is_ok() {
            to.push(b'\n');
        }
    })
}

fn write_spans(resource: &Resource, spans: Vec<SpanData>, to: &mut Vec<u8>) -> serde_json::Result<()> {
    let resource_spans = group_spans_by_resource_and_scope(spans, &resource.into());
    serde_json::to_writer(to, &ExportTraceServiceRequest { resource_spans })
}

fn write_record(resource: &Resource, record: &SdkLogRecord, to: &mut Vec<u8>) -> serde_json::Result<()> {
    let scope = scope();
    let entries = [(record, &scope)];
    let batch = LogBatch::new(&entries);
    let resource_logs = group_logs_by_resource_and_scope(&batch, &resource.into());
    serde_json::to_writer(to, &ExportLogsServiceRequest { resource_logs })
}
