//! When a run is published whatever is missing.

use std::time::Duration;

use anyhow::Result;
use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};
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
        let end = drain.child_token();
        if let Some(left) = self.seconds_left() {
            let end = end.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs_f64(left.max(0.0))).await;
                end.cancel();
            });
        }
        end
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
