//! What a process tells Prometheus, how it logs, and the trace of a run.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use laser_coordinator::nats::NatsEvents;
use laser_schema::Digest;
use metrics::{counter, describe_counter, describe_gauge, gauge};
use metrics_exporter_prometheus::PrometheusBuilder;
use opentelemetry::trace::{SpanId, TraceId, TracerProvider};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SdkTracerProvider};
use tracing::{Level, Span, Subscriber, error_span};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::config::{Config, LogFormat};

/// Between two readings of the connection's counters.
const READ_EVERY: Duration = Duration::from_secs(5);

/// Serves `/metrics` where the configuration says, if it does.
///
/// # Errors
/// If the address is taken.
pub(crate) fn serve(config: &Config) -> Result<()> {
    let Some(listen) = config.metrics.listen else {
        return Ok(());
    };
    PrometheusBuilder::new()
        .with_http_listener(listen)
        .install()
        .with_context(|| format!("[metrics] listen = \"{listen}\": cannot serve metrics there"))?;
    laser_worker::telemetry::describe();
    describe();
    gauge!("laser_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    if let Some(price) = &config.price {
        gauge!("laser_gpu_hour_price", "currency" => price.currency.clone()).set(price.gpu_hour);
    }
    Ok(())
}

fn describe() {
    describe_gauge!("laser_build_info", "1, with the version as label");
    describe_gauge!("laser_gpu_hour_price", "What an engine costs an hour: [price] gpu_hour");
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

/// Whether each line of standard error is a JSON object.
static JSON: AtomicBool = AtomicBool::new(false);

/// Says why the command ends.
pub(crate) fn tell_error(message: &str) {
    tell("error", message);
}

/// Says something that no filter may hold back, as a line or as a JSON object.
pub(crate) fn tell(what: &str, message: &str) {
    match JSON.load(Ordering::Relaxed) {
        true => eprintln!("{}", serde_json::json!({ "level": what, "message": message })),
        false => eprintln!("{what}: {message}"),
    }
}

/// The target of spans that only a trace has: the parts of a night and of a shard.
const TRACE_TARGET: &str = "laser::trace";

/// Where traces go, by OpenTelemetry's standard variables; the first that is set counts.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Sends logs to standard error, as text or as a JSON object a line, and traces to an OpenTelemetry collector if the
/// environment names one. `RUST_LOG` chooses what is logged.
///
/// # Errors
/// If the collector's address is none.
pub(crate) fn start(format: LogFormat) -> Result<Traces> {
    JSON.store(matches!(format, LogFormat::Json), Ordering::Relaxed);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOGGED));
    let traces = Traces::open()?;
    subscriber(format, filter, traces.0.as_ref())?.init();
    Ok(traces)
}

/// What is logged unless `RUST_LOG` says otherwise.
const LOGGED: &str = "error,laser=warn,laser_worker=warn,laser_coordinator=warn";

/// Its most verbose level is known, so that what libraries say below it costs a comparison: `tokenizers` logs every
/// step of every text, which took a sixth of planning while each line was asked for first.
fn subscriber(
    format: LogFormat,
    filter: EnvFilter,
    provider: Option<&SdkTracerProvider>,
) -> Result<impl Subscriber + Send + Sync> {
    let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    let log = match format {
        LogFormat::Text => layer.boxed(),
        // One span is enough: a shard's names its run too.
        LogFormat::Json => {
            let layer = layer.json().flatten_event(true);
            layer.with_span_list(false).boxed()
        }
    };
    let filter = filter.add_directive(format!("{TRACE_TARGET}=off").parse()?);
    let trace = provider.map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("laser"))
            .with_filter(Targets::new().with_target("laser", Level::INFO))
    });
    Ok(tracing_subscriber::registry().with(log.with_filter(filter)).with(trace))
}

/// The traces of this process.
#[derive(Debug)]
pub(crate) struct Traces(Option<SdkTracerProvider>);

impl Traces {
    fn open() -> Result<Self> {
        let set = |name: &&&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let Some(variable) = ENDPOINTS.iter().find(set) else {
            return Ok(Self(None));
        };
        let exporter = SpanExporter::builder().with_http().build().with_context(|| {
            format!("{variable}: no address of a collector that takes OTLP over HTTP, such as http://localhost:4318")
        })?;
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("laser");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_id_generator(RunTraceIds::default())
            .with_resource(resource.build())
            .build();
        Ok(Self(Some(provider)))
    }

    /// Sends what has not been sent. That a collector is away is no reason to fail.
    pub(crate) fn end(self) {
        if let Some(Err(error)) = self.0.map(|provider| provider.shutdown()) {
            tell("warning", &format!("the last traces were not sent: {error}"));
        }
    }
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

#[derive(Debug, Default)]
struct RunTraceIds(RandomIdGenerator);

impl IdGenerator for RunTraceIds {
    fn new_trace_id(&self) -> TraceId {
        match *TRACE.lock().unwrap_or_else(PoisonError::into_inner) {
            TraceId::INVALID => self.0.new_trace_id(),
            of_run => of_run,
        }
    }

    fn new_span_id(&self) -> SpanId {
        self.0.new_span_id()
    }
}

#[cfg(test)]
mod tests {
    use tracing::Subscriber;
    use tracing_subscriber::EnvFilter;
    use tracing_subscriber::filter::LevelFilter;

    use super::{LOGGED, subscriber};
    use crate::config::LogFormat;

    #[test]
    fn what_nobody_logs_is_not_asked_for() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let subscriber = subscriber(format, EnvFilter::new(LOGGED), None).unwrap();
            assert_eq!(subscriber.max_level_hint(), Some(LevelFilter::WARN));
        }
    }
}
