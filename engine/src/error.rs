//! The errors between a model path and its scores.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use laser_model::ModelError;
use laser_schema::DeviceOption;

use crate::segment::Slot;

/// An engine could not be loaded, or was used against its protocol, or a forward failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Nothing at the model path.
    #[error(
        "model path {} does not exist: give a directory with config.json and *.safetensors, or a .gguf file (a hub id \
         must be fetched first)",
        path.display()
    )]
    MissingModel {
        /// The path given.
        path: PathBuf,
    },
    /// A file that every model directory must have.
    #[error("model directory {} has no {file}: {remedy}", directory.display())]
    MissingFile {
        /// The model directory.
        directory: PathBuf,
        /// The file looked for.
        file: String,
        /// How to mend it.
        remedy: String,
    },
    /// A model directory without weights, or with others than its index says.
    #[error(transparent)]
    Weights(#[from] ModelError),
    /// The path is a file of another kind.
    #[error("model path {} is neither a directory nor a .gguf file", path.display())]
    UnknownFormat {
        /// The path given.
        path: PathBuf,
    },
    /// A file of the model that is damaged, or that asks for something not implemented.
    #[error("{}: {message}", file.display())]
    Model {
        /// config.json, the weights or the directory that they are in.
        file: PathBuf,
        /// What was expected and what came.
        message: String,
    },
    /// An option that does not fit the model or the device.
    #[error("option {option} = {value:?}: {message}")]
    InvalidOption {
        /// Name in the configuration.
        option: &'static str,
        /// The value given.
        value: String,
        /// Why not, and what to choose.
        message: String,
    },
    /// A slot that was never opened or is closed.
    #[error("slot {slot} is not open")]
    UnknownSlot {
        /// The handle given.
        slot: Slot,
    },
    /// A cache for nothing.
    #[error("capacity must be at least 1 token, got 0")]
    NoCapacity,
    /// The keys and values of one more sequence would exceed the bound on all.
    #[error(
        "a sequence of {capacity} tokens needs {megabytes} MB for its keys and values, and {used} of {limit} MB are in \
         use: raise [model] cache_mb, or lower [generate] max_new_tokens"
    )]
    CacheFull {
        /// Tokens that the sequence may grow to.
        capacity: usize,
        /// What they take.
        megabytes: usize,
        /// What open sequences may grow to.
        used: usize,
        /// The bound.
        limit: usize,
    },
    /// A fork, a step or a commit that breaks the protocol of [`Engine`](crate::Engine).
    #[error("slot {slot}: {message}")]
    Protocol {
        /// The slot.
        slot: Slot,
        /// What was expected and what came.
        message: String,
    },
    /// A tensor operation failed, most likely for want of memory.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The device computes something else than the CPU.
    #[error(
        "device {device} fails the self-test ({message}): its results are wrong, and its texts would be; use a laser \
         built for this GPU's compute capability (CUDA_COMPUTE_CAP) and a driver that fits, or another [model] device"
    )]
    SelfTest {
        /// The device.
        device: DeviceOption,
        /// Where it differs, and by how much.
        message: String,
    },
    /// mistralrs refused the model or a request.
    #[error("mistralrs: {message}")]
    Mistralrs {
        /// Its own message.
        message: String,
    },
}

impl EngineError {
    pub(super) fn model(file: &Path, message: impl Into<String>) -> Self {
        Self::Model { file: file.to_owned(), message: message.into() }
    }

    /// A weight file that is truncated or not what its name says.
    pub(super) fn corrupt(file: &Path, reason: impl Display) -> Self {
        Self::model(file, format!("unreadable weights: {reason}; fetch the file again"))
    }

    /// Weights that are to draft from a model's features, and were made for another model.
    pub(super) fn misfit(file: &Path, difference: impl Display) -> Self {
        let remedy = "train one for this model with `laser train draft`, or take it out of [draft.model]";
        Self::model(file, format!("{difference}; {remedy}"))
    }

    /// A tensor that the architecture needs.
    pub(super) fn missing_tensor(path: &Path, name: &str) -> Self {
        Self::model(path, format!("tensor {name} is missing, though config asks for it"))
    }

    /// Refuses a tensor of another shape than the configuration says.
    pub(super) fn check_shape(path: &Path, name: &str, expected: &[usize], got: &[usize]) -> Result<(), Self> {
        match got == expected {
            true => Ok(()),
            false => Err(Self::model(path, format!("tensor {name} has shape {got:?}, expected {expected:?}"))),
        }
    }
}
