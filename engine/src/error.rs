//! The errors between a model path and its scores.

use std::path::PathBuf;

use crate::{architecture::Architecture, segment::Slot};

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
    /// The path is a file of another kind.
    #[error("model path {} is neither a directory nor a .gguf file", path.display())]
    UnknownFormat {
        /// The path given.
        path: PathBuf,
    },
    /// A model that the tree engine does not implement.
    #[error(
        "{}: architecture {architecture} is not supported by the tree engine (supported: {}); choose engine = \
         \"mistralrs\" to decode it without speculation",
        file.display(),
        Architecture::supported()
    )]
    UnsupportedArchitecture {
        /// config.json or the GGUF file.
        file: PathBuf,
        /// The architecture it names.
        architecture: String,
    },
    /// A configuration that cannot be read or asks for something not implemented.
    #[error("{}: {message}", file.display())]
    InvalidConfig {
        /// config.json, the safetensors index or the GGUF file.
        file: PathBuf,
        /// Key, expected and got.
        message: String,
    },
    /// A weight file that is truncated or not what its name says.
    #[error("{}: unreadable weights: {message}; fetch the file again", file.display())]
    CorruptWeights {
        /// The file.
        file: PathBuf,
        /// The reader's message.
        message: String,
    },
    /// A tensor that the architecture needs.
    #[error("{}: tensor {name} is missing, though config asks for it", path.display())]
    MissingTensor {
        /// The model directory or file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
    },
    /// A tensor of another shape than the configuration says.
    #[error("{}: tensor {name} has shape {got:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// The model directory or file.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// Shape by configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        got: Vec<usize>,
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
    /// mistralrs refused the model or a request.
    #[error("mistralrs: {message}")]
    Mistralrs {
        /// Its own message.
        message: String,
    },
}
