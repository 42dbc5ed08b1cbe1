//! Where a process serves metrics, how it logs, and where its traces go.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use clap::ValueEnum;
use laser_night::Config;
use laser_night::telemetry::{RunTraceIds, describe};
use metrics::{describe_gauge, gauge};
use metrics_exporter_prometheus::PrometheusBuilder;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

/// How logs are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

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
    describe();
    describe_gauge!("laser_build_info", "1, with the version as label");
    describe_gauge!("laser_gpu_hour_price", "What an engine costs an hour: [price] gpu_hour");
    gauge!("laser_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    if let Some(price) = &config.price {
        gauge!("laser_gpu_hour_price", "currency" => price.currency.clone()).set(price.gpu_hour);
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use tracing::Subscriber;
    use tracing_subscriber::EnvFilter;
    use tracing_subscriber::filter::LevelFilter;

    use super::{LOGGED, LogFormat, subscriber};

    #[test]
    fn what_nobody_logs_is_not_asked_for() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let subscriber = subscriber(format, EnvFilter::new(LOGGED), None).unwrap();
            assert_eq!(subscriber.max_level_hint(), Some(LevelFilter::WARN));
        }
    }
}
