//! What a user sees while something runs: a bar on a terminal, a JSON line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use laser_schema::Progress;

/// Between two JSON lines: rare enough for a log of a night, often enough to see that it lives.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Between two turns of the spinner.
const TICK: Duration = Duration::from_millis(200);

/// Shows stages and how far they are, on standard error.
#[derive(Debug)]
pub struct Display {
    bar: Option<ProgressBar>,
    stage: String,
    started: Instant,
    last_line: Option<Instant>,
}

impl Default for Display {
    fn default() -> Self {
        Self::new()
    }
}

impl Display {
    /// A bar if standard error is a terminal, JSON lines if not.
    pub fn new() -> Self {
        let bar =
            std::io::stderr().is_terminal().then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()));
        Self { bar, stage: String::new(), started: Instant::now(), last_line: None }
    }

    /// One JSON line; the remaining time is extrapolated from the stage's mean rate.
    fn line(&mut self, done: u64, total: Option<u64>, message: &str) {
        self.last_line = Some(Instant::now());
        let elapsed = self.started.elapsed().as_secs_f64();
        let eta = total.filter(|_| done > 0).map(|total| elapsed * total.saturating_sub(done) as f64 / done as f64);
        let round = |seconds: f64| (seconds * 10.0).round() / 10.0;
        let line = serde_json::json!({
            "stage": self.stage,
            "done": done,
            "total": total,
            "elapsed_s": round(elapsed),
            "eta_s": eta.map(round),
            "detail": message,
        });
        eprintln!("{line}");
    }

    fn finish(&mut self) {
        if let Some(bar) = &self.bar {
            bar.disable_steady_tick();
            bar.finish_and_clear();
        }
    }
}

impl Progress for Display {
    fn stage(&mut self, name: &str) {
        self.finish();
        name.clone_into(&mut self.stage);
        self.started = Instant::now();
        self.last_line = None;
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_style(style("{spinner} {prefix}  {pos} {msg}"));
            bar.set_prefix(name.to_owned());
            bar.set_message("");
            bar.enable_steady_tick(TICK);
        }
    }

    fn update(&mut self, done: u64, total: Option<u64>, message: &str) {
        if let Some(bar) = &self.bar {
            if let Some(total) = total.filter(|_| bar.length() != total) {
                bar.set_length(total);
                bar.set_style(style("{prefix}  {bar:32} {pos}/{len}  ETA {eta}  {msg}"));
            }
            bar.set_position(done);
            bar.set_message(message.to_owned());
            return;
        }
        if self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
            self.line(done, total, message);
        }
    }

    fn finish_with(&mut self, message: &str) {
        if let Some(bar) = &self.bar {
            let seconds = self.started.elapsed().as_secs_f64();
            bar.println(format!("{:<24} {message} ({seconds:.1} s)", self.stage));
        } else {
            self.line(1, Some(1), message);
        }
        self.finish();
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.finish();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
