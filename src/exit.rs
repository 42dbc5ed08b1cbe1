//! Exit codes, which schedulers act on.

use anyhow::Error;
use laser_coordinator::finalise::FinaliseError;
use laser_coordinator::nats::NatsError;
use laser_delta::DeltaError;
use laser_store::StoreError;
use laser_store::location::is_refusal;
use laser_store::verdict::VerdictError;
use laser_worker::run::WorkerError;

/// Input, configuration, rights or coverage: needs a hand.
pub(crate) const DATA_ERROR: u8 = 65;
/// Incomplete, or a server did not answer: the same command again.
pub(crate) const TRY_AGAIN: u8 = 75;
/// Stopped by a signal.
pub(crate) const DRAINED: u8 = 143;

/// What may pass by itself is worth another try; the rest needs a hand.
pub(crate) fn code(error: &Error) -> u8 {
    if is_refused(error) {
        return DATA_ERROR;
    }
    let passing = error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(StoreError::Generic { .. }))
            || matches!(cause.downcast_ref(), Some(DeltaError::Conflicts { .. }))
            || cause.downcast_ref::<WorkerError>().is_some()
            || matches!(
                cause.downcast_ref(),
                Some(NatsError::Connect { .. } | NatsError::Request { .. } | NatsError::Away { .. })
            )
    });
    if passing { TRY_AGAIN } else { DATA_ERROR }
}

/// Whether a store did not let us in.
pub(crate) fn is_refused(error: &Error) -> bool {
    let refusal =
        |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<StoreError>().is_some_and(is_refusal);
    error.chain().any(refusal)
}

/// Whether something in the store is not what its writer wrote, or does not fit what is there.
pub(crate) fn is_damage(error: &Error) -> bool {
    match error.downcast_ref() {
        None => false,
        Some(FinaliseError::Location(_) | FinaliseError::Verdict(VerdictError::Location(_))) => false,
        Some(FinaliseError::Delta(error)) => matches!(error, DeltaError::Unfit { .. } | DeltaError::Part(_)),
        Some(_) => true,
    }
}
