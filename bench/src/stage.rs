//! What a stage of a measurement takes from the machine: time, processor time, memory.

use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A finished stage.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Stage {
    pub(super) stage: String,
    pub(super) seconds: f64,
    /// Of all threads.
    pub(super) cpu_seconds: f64,
    pub(super) rows_per_second: f64,
    /// Highest resident set of the process in this stage.
    pub(super) peak_mb: f64,
}

/// A stage under way.
pub(super) struct Watch {
    stage: &'static str,
    started: Instant,
    cpu_seconds: f64,
}

impl Watch {
    pub(super) fn start(stage: &'static str) -> Result<Self> {
        // "5" forgets the peak so far (proc(5)).
        std::fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")?;
        Ok(Self { stage, started: Instant::now(), cpu_seconds: cpu_seconds()? })
    }

    /// Ends a stage that handled `rows` rows.
    pub(super) fn stop(self, rows: u64) -> Result<Stage> {
        let seconds = self.started.elapsed().as_secs_f64();
        Ok(Stage {
            stage: self.stage.to_owned(),
            seconds,
            cpu_seconds: cpu_seconds()? - self.cpu_seconds,
            rows_per_second: rows as f64 / seconds,
            peak_mb: status_mb("VmHWM")?,
        })
    }
}

/// A size in `/proc/self/status`.
pub(super) fn status_mb(key: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.trim_matches(|c: char| !c.is_ascii_digit()).parse().ok());
    let kib: f64 = number.with_context(|| format!("/proc/self/status has no {key}"))?;
    Ok(kib / 1024.0)
}

/// Seconds of all threads on a processor so far, in steps of Linux' hundredth of a second.
pub(super) fn cpu_seconds() -> Result<f64> {
    cpu_seconds_of(std::process::id())
}

/// The same for another process.
pub(super) fn cpu_seconds_of(process: u32) -> Result<f64> {
    let file = format!("/proc/{process}/stat");
    let stat = std::fs::read_to_string(&file).with_context(|| file.clone())?;
    let (_, fields) = stat.rsplit_once(')').context(file)?;
    // The fields after the name: user time is the 12th, system time the 13th (proc(5)).
    let times = fields.split_whitespace().skip(11).take(2);
    Ok(times.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0)
}
