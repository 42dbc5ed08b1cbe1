//! Exit codes, which schedulers act on.

use anyhow::Error;
use laser_night::failure;

/// Input, configuration, rights or coverage: needs a hand.
pub(crate) const DATA_ERROR: u8 = 65;
/// Incomplete, or a server did not answer: the same command again.
pub(crate) const TRY_AGAIN: u8 = 75;
/// Stopped by a signal.
pub(crate) const DRAINED: u8 = 143;

/// What may pass by itself is worth another try; the rest needs a hand.
pub(crate) fn code(error: &Error) -> u8 {
    if failure::may_pass(error) { TRY_AGAIN } else { DATA_ERROR }
}
