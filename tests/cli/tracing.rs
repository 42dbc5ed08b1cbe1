//! The trace of a run, as an OpenTelemetry collector receives it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

use crate::distributed::{Cluster, Process};
use crate::proxy::{head_length, read_request};
use crate::{Workspace, assert_exit, assert_refused, read_json};

/// Takes OTLP over HTTP and keeps all spans.
struct Collector {
    endpoint: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let spans = Arc::new(Mutex::new(Vec::new()));
        let kept = spans.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let kept = kept.clone();
                std::thread::spawn(move || while receive(&stream, &kept) {});
            }
        });
        Self { endpoint, spans }
    }

    fn command(&self, mut command: Command) -> Command {
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &self.endpoint);
        command
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }
}

/// One request; `false`: the connection has ended.
fn receive(mut stream: &TcpStream, spans: &Mutex<Vec<Span>>) -> bool {
    let Ok(request) = read_request(&mut stream) else {
        return false;
    };
    assert!(request.starts_with(b"POST /v1/traces HTTP/1.1\r\n"));
    let body = &request[head_length(&request).unwrap()..];
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    for of_process in request.resource_spans {
        let attributes = of_process.resource.unwrap().attributes;
        let name = attributes.iter().find(|a| a.key == "service.name").unwrap();
        let name = name.value.clone().unwrap().value.unwrap();
        assert_eq!(name, Value::StringValue("laser".into()));
        let mut spans = spans.lock().unwrap();
        spans.extend(of_process.scope_spans.into_iter().flat_map(|s| s.spans));
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_ok()
}

fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

fn children<'a>(spans: &'a [Span], parent: &Span) -> BTreeSet<&'a str> {
    let children = spans.iter().filter(|s| s.parent_span_id == parent.span_id);
    children.map(|span| span.name.as_str()).collect()
}

fn shard_number(span: &Span) -> i64 {
    let attribute = span.attributes.iter().find(|a| a.key == "shard").unwrap();
    // Unsigned numbers have no type of their own in OTLP.
    match attribute.value.clone().unwrap().value.unwrap() {
        Value::StringValue(shard) => shard.parse().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_run_is_one_trace_whatever_process_works_for_it() {
    let (cluster, collector) = (Cluster::new("LASER_NATS_NEW"), Collector::start());
    let start = |role| Process::start(collector.command(cluster.tonight.command(role, &[])));
    let coordinator = start("coordinator");
    coordinator.wait_for("queued shards", 1);
    cluster.finish(coordinator, start("worker"));

    let spans = collector.spans();
    let traces: BTreeSet<&[u8]> = named(&spans, "run").iter().map(|run| run.trace_id.as_slice()).collect();
    assert_eq!(named(&spans, "run").len(), 2, "coordinator and worker");
    assert_eq!(traces.len(), 1);
    for span in &spans {
        assert!(traces.contains(span.trace_id.as_slice()), "{span:?}");
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{span:?}");
    }
    let of_runs: BTreeSet<&str> = named(&spans, "run").into_iter().flat_map(|run| children(&spans, run)).collect();
    assert_eq!(of_runs, BTreeSet::from(["pools", "plan", "watch", "shard"]));

    let shards = named(&spans, "shard").into_iter();
    let shards: BTreeMap<i64, &Span> = shards.map(|shard| (shard_number(shard), shard)).collect();
    let plan: serde_json::Value = read_json(&cluster.run_folder().join("plan.json"));
    for job in plan["shards"].as_array().unwrap() {
        let shard = shards[&job["shard"].as_i64().unwrap()];
        let wanted = match job["action"].as_str().unwrap() {
            "generate" => BTreeSet::from(["read", "generate", "commit"]),
            _ => BTreeSet::from(["read", "commit"]),
        };
        assert_eq!(children(&spans, shard), wanted, "{job}");
    }
}

#[test]
fn a_night_in_one_process_is_a_trace_too() {
    let (workspace, collector) = (Workspace::new(), Collector::start());
    let night = collector.command(workspace.command("run", &[])).output();
    assert_exit(&night.unwrap(), 0);
    let spans = collector.spans();
    for publish in named(&spans, "publish") {
        let parent = spans.iter().find(|s| s.span_id == publish.parent_span_id);
        assert_eq!(parent.unwrap().name, "generate");
    }
    // The demo's two nights.
    let runs = named(&spans, "run");
    assert_eq!(runs.len(), 2);
    assert_ne!(runs[0].trace_id, runs[1].trace_id);
    for run in runs {
        let stages = children(&spans, run);
        assert_eq!(stages, BTreeSet::from(["pools", "plan", "generate"]));
    }
}

#[test]
fn a_collector_that_is_away_or_no_address_is_told() {
    let workspace = Workspace::new();
    let config = |endpoint: &str| {
        let mut command = workspace.command("config", &[]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint);
        command.output().unwrap()
    };
    // What is told of a collector that is away is a warning: the night counts.
    assert_exit(&config("http://127.0.0.1:1"), 0);
    assert_refused(&config("not an address"), &["OTEL_EXPORTER_OTLP_ENDPOINT", "4318"]);
}
