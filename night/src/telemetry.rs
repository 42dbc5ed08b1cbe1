//! The gauges of a run, and the trace that all processes of a run write into.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use laser_coordinator::nats::NatsEvents;
use laser_schema::Digest;
use metrics::{counter, describe_counter, describe_gauge};
use opentelemetry::trace::{SpanId, TraceId};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use tracing::{Span, error_span};

/// Between two readings of the connection's counters.
const READ_EVERY: Duration = Duration::from_secs(5);

/// Describes the metrics of a night and its workers.
pub fn describe() {
    laser_worker::telemetry::describe();
    describe_gauge!("laser_run_shards", "Shards of the run by state: open, committed or dead");
    describe_gauge!("laser_run_rows", "Rows of the run: committed and total");
    describe_gauge!(
        "laser_run_eta_seconds",
        "Seconds until all rows are committed, at the rate since this process started"
    );
    describe_gauge!("laser_run_deadline_seconds", "Seconds left until the deadline");
    describe_counter!("laser_republished_shards_total", "Shards put into the queue, the first time included");
    describe_counter!("laser_nats_events_total", "Events of the connection to NATS");
}

/// Keeps the counters of a connection up to date for as long as the process lives.
pub(crate) fn watch_nats(events: Arc<NatsEvents>) {
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(READ_EVERY);
        loop {
            ticks.tick().await;
            let tell = |event: &'static str, count: &AtomicU64| {
                counter!("laser_nats_events_total", "event" => event).absolute(count.load(Ordering::Relaxed));
            };
            tell("connected", &events.connected);
            tell("disconnected", &events.disconnected);
            tell("slow_consumer", &events.slow_consumers);
            tell("permission_violation", &events.permission_violations);
            tell("error", &events.errors);
        }
    });
}

/// The trace of the run that this process works on.
static TRACE: Mutex<TraceId> = Mutex::new(TraceId::INVALID);

/// The span of all that this process does for a run. All processes of a run, restarts included, write into one
/// trace, since its id is a digest of the run's name: nothing needs to travel with the shards.
pub(crate) fn run_span(run: &str) -> Span {
    let digest = Digest::of(run.as_bytes());
    let id = digest.as_str().get(..32);
    let id = id.and_then(|id| TraceId::from_hex(id).ok());
    *TRACE.lock().unwrap_or_else(PoisonError::into_inner) = id.unwrap_or(TraceId::INVALID);
    error_span!("run", run)
}

/// Names traces after the run that this process works on, and at random before there is one.
#[derive(Debug, Default)]
pub struct RunTraceIds(RandomIdGenerator);

impl IdGenerator for RunTraceIds {
    fn new_trace_id(&self) -> TraceId {
        match *TRACE.lock().unwrap_or_else(PoisonError::into_inner) {
            TraceId::INVALID => self.0.new_trace_id(),
            run => run,
        }
    }

    fn new_span_id(&self) -> SpanId {
        self.0.new_span_id()
    }
}
