//! What kind of failure an error is: one to mend, or one that may pass.

use anyhow::Error;
use laser_coordinator::finalise::FinaliseError;
use laser_coordinator::nats::NatsError;
use laser_coordinator::retention::RetentionError;
use laser_delta::DeltaError;
use laser_model::ModelError;
use laser_store::StoreError;
use laser_store::data_set::ManifestError;
use laser_store::location::is_refusal;
use laser_store::run_store::RunStoreError;
use laser_worker::error::WorkerError;

/// Whether the same command may succeed later: a store or a server that did not answer, a worker that was lost.
pub fn may_pass(error: &Error) -> bool {
    let passes = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(StoreError::Generic { .. }))
            || matches!(cause.downcast_ref(), Some(DeltaError::Conflicts { .. }))
            || matches!(cause.downcast_ref(), Some(FinaliseError::Delta(DeltaError::Conflicts { .. })))
            || matches!(cause.downcast_ref(), Some(RetentionError::Delta(DeltaError::Conflicts { .. })))
            || cause.downcast_ref::<WorkerError>().is_some()
            || matches!(cause.downcast_ref(), Some(ModelError::HubAway { .. }))
            || matches!(
                cause.downcast_ref(),
                Some(NatsError::Connect { .. } | NatsError::Request { .. } | NatsError::Away)
            )
    };
    !is_refused(error) && error.chain().any(passes)
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
        Some(
            FinaliseError::Location(_)
            | FinaliseError::Run(RunStoreError::Location(_))
            | FinaliseError::Manifest(ManifestError::Location(_))
            | FinaliseError::Spill(_)
            | FinaliseError::Ended(_),
        ) => false,
        Some(FinaliseError::Delta(error)) => error.is_damage(),
        Some(_) => true,
    }
}
