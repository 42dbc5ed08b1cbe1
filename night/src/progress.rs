//! How far a worker is.

use std::time::{Duration, Instant};

use anyhow::Result;
use laser_schema::Progress;
use laser_worker::error::WorkerError;
use laser_worker::progress::Progress as WorkerProgress;

/// Between two updates of a worker's figures.
const TICK: Duration = Duration::from_millis(200);

/// Drives a worker to its end and shows what it generates, of so many `texts` if that is known.
pub(crate) async fn show_work<G>(
    worker: impl Future<Output = Result<G, WorkerError>>,
    counters: &WorkerProgress,
    texts: Option<u64>,
    progress: &mut dyn Progress,
    detail: &dyn Fn() -> String,
) -> Result<G> {
    let started = Instant::now();
    tokio::pin!(worker);
    let mut ticks = tokio::time::interval(TICK);
    let generator = loop {
        tokio::select! {
            ended = &mut worker => break ended?,
            _ = ticks.tick() => {
                let now = counters.snapshot();
                let done = now.figures.texts + now.carried + now.errors;
                let rate = now.figures.tokens as f64 / started.elapsed().as_secs_f64();
                progress.update(done, texts, &format!(
                    "texts, {rate:.0} tokens/s, {:.1} accepted a forward, {}",
                    now.figures.aal(), detail()
                ));
            }
        }
    };
    let now = counters.snapshot();
    progress.finish_with(&format!(
        "{} texts, {} tokens, {} carried forward, {} errors; {}",
        now.figures.texts,
        now.figures.tokens,
        now.carried,
        now.errors,
        detail()
    ));
    Ok(generator)
}
