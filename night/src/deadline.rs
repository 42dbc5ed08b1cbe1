//! When a run is published whatever is missing.

use std::time::Duration;

use anyhow::Result;
use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};
use laser_worker::run::Stop;
use tokio_util::sync::CancellationToken;

/// When a run is published whatever is missing, if ever.
#[derive(Debug, Clone)]
pub(crate) struct Deadline(Option<Zoned>);

impl Deadline {
    /// The first `time` of day after the run was planned, if there is one.
    pub(crate) fn new(time: Option<Time>, planned: Timestamp) -> Result<Self> {
        let first = |time| first_after(planned.to_zoned(TimeZone::system()), time);
        Ok(Self(time.map(first).transpose()?))
    }

    /// Seconds left; negative after it.
    pub(crate) fn seconds_left(&self) -> Option<f64> {
        let at = self.0.as_ref()?;
        Some(at.timestamp().duration_since(Timestamp::now()).as_secs_f64())
    }

    /// Whether it lies behind.
    pub(crate) fn has_passed(&self) -> bool {
        self.seconds_left().is_some_and(|left| left <= 0.0)
    }

    /// A token that is cancelled with `drain` or at the deadline, whichever comes first.
    pub(crate) fn end(&self, drain: &CancellationToken) -> CancellationToken {
        self.stop(drain).drain
    }

    /// How a worker of this process is told to end: after `drain` it finishes the shards in hand, at the deadline it
    /// gives them back. A commit in hand is finished however long it takes: nothing is published before.
    pub(crate) fn stop(&self, drain: &CancellationToken) -> Stop {
        let stop = Stop { drain: drain.child_token(), ..Stop::default() };
        if self.0.is_some() {
            let (deadline, stop) = (self.clone(), stop.clone());
            tokio::spawn(async move {
                deadline.pass().await;
                stop.drain.cancel();
                stop.release.cancel();
            });
        }
        stop
    }

    /// Returns once it lies behind, even if the clock is set back meanwhile: what is given back must then be sealed.
    async fn pass(&self) {
        while let Some(left) = self.seconds_left().filter(|left| *left > 0.0) {
            tokio::time::sleep(Duration::from_secs_f64(left)).await;
        }
    }
}

/// Seconds from a time to the first deadline after it, if there is one.
///
/// # Errors
/// If the calendar has no such time.
pub fn seconds_until(time: Option<Time>, from: Timestamp) -> Result<Option<f64>> {
    let Deadline(at) = Deadline::new(time, from)?;
    Ok(at.map(|at| at.timestamp().duration_since(from).as_secs_f64()))
}

/// The first moment from `from` on with this time of day.
fn first_after(from: Zoned, time: Time) -> Result<Zoned> {
    let today = from.with().time(time).build()?;
    Ok(match today < from {
        true => today.checked_add(1.day())?,
        false => today,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_deadline_releases_a_worker_and_a_signal_only_drains_it() {
        let signal = CancellationToken::new();
        let late = Deadline(Some(Zoned::now())).stop(&signal);
        late.drain.cancelled().await;
        late.release.cancelled().await;
        assert!(!late.abandon.is_cancelled() && !signal.is_cancelled());
        let stop = Deadline(None).stop(&signal);
        assert!(!stop.drain.is_cancelled());
        signal.cancel();
        assert!(stop.drain.is_cancelled() && !stop.release.is_cancelled());
    }
}
