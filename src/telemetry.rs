//! What a process tells Prometheus, and how it logs.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use laser_coordinator::nats::NatsEvents;
use metrics::{counter, describe_counter, describe_gauge, gauge};
use metrics_exporter_prometheus::PrometheusBuilder;

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
    describe_gauge!(
        "laser_gpu_hour_price",
        "What an engine costs an hour: [price] gpu_hour"
    );
    describe_gauge!(
        "laser_run_shards",
        "Shards of the run by state: open, committed or dead"
    );
    describe_gauge!("laser_run_rows", "Rows of the run: committed and total");
    describe_gauge!(
        "laser_run_eta_seconds",
        "Seconds until all rows are committed, at the rate since this process started"
    );
    describe_gauge!(
        "laser_run_deadline_seconds",
        "Seconds left until the deadline"
    );
    describe_counter!(
        "laser_republished_shards_total",
        "Shards put into the queue, the first time included"
    );
    describe_counter!(
        "laser_nats_events_total",
        "Events of the connection to NATS"
    );
}

/// Keeps the counters of a connection up to date for as long as the process lives.
pub(crate) fn watch_nats(events: Arc<NatsEvents>) {
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(READ_EVERY);
        loop {
            ticks.tick().await;
            let tell = |event: &'static str, count: &AtomicU64| {
                counter!("laser_nats_events_total", "event" => event)
                    .absolute(count.load(Ordering::Relaxed));
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
        true => eprintln!(
            "{}",
            serde_json::json!({ "level": what, "message": message })
        ),
        false => eprintln!("{what}: {message}"),
    }
}

/// Sends logs to standard error, as text or as a JSON object a line. `RUST_LOG` chooses what is logged.
pub(crate) fn log(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new(
            "error,laser=warn,laser_worker=warn,laser_coordinator=warn",
        )
    });
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.init(),
        // One span is enough: a shard's names its run too.
        LogFormat::Json => {
            JSON.store(true, Ordering::Relaxed);
            builder
                .json()
                .flatten_event(true)
                .with_span_list(false)
                .init();
        }
    }
}
