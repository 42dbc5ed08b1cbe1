//! How far a worker is.

use std::time::{Duration, Instant};

use anyhow::Result;
use laser_schema::Progress;
use laser_worker::error::WorkerError;
use laser_worker::run::RunContext;

/// Between two updates of a worker's figures.
const TICK: Duration = Duration::from_millis(200);

/// Drives a worker to its end and shows what it generates, of so many texts or lists if that is known.
pub(crate) async fn show_work<G>(
    worker: impl Future<Output = Result<G, WorkerError>>,
    (context, total): (&RunContext, Option<u64>),
    progress: &mut dyn Progress,
    detail: &dyn Fn() -> String,
) -> Result<G> {
    let (started, counters) = (Instant::now(), &context.progress);
    let is_list = context.run.plan.spec.lists.is_some();
    tokio::pin!(worker);
    let mut ticks = tokio::time::interval(TICK);
    let generator = loop {
        tokio::select! {
            ended = &mut worker => break ended?,
            _ = ticks.tick() => {
                let now = counters.snapshot();
                let done = now.figures.texts + now.carried + now.errors;
                let seconds = started.elapsed().as_secs_f64();
                let figures = match is_list {
                    true => format!("lists, {:.0} a second", now.figures.texts as f64 / seconds),
                    false => {
                        let rate = now.figures.tokens as f64 / seconds;
                        format!("texts, {rate:.0} tokens/s, {:.1} accepted a forward", now.figures.aal())
                    }
                };
                progress.update(done, total, &format!("{figures}, {}", detail()));
            }
        }
    };
    let now = counters.snapshot();
    let made = match is_list {
        true => format!("{} lists", now.figures.texts),
        false => format!("{} texts, {} tokens", now.figures.texts, now.figures.tokens),
    };
    progress.finish_with(&format!("{made}, {} carried forward, {} errors; {}", now.carried, now.errors, detail()));
    Ok(generator)
}
