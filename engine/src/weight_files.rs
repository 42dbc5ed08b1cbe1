//! Weights of a folder as Hugging Face has them, read and converted tensor by tensor: safetensors files, which are
//! mapped, or a file as PyTorch saves it.
//!
//! The latter is a zip archive (PyTorch 1.6 and later) of a pickle, which tells names, shapes and places, and of the
//! values. The pickle is read as data: nothing that it names is run.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Error, Tensor, pickle::PthTensors, safetensors::MmapedSafetensors};
use laser_decode::Token;
use laser_model::{Weights, weights_in};
use mistralrs_quant::IsqType;

use crate::{dense::DenseTensors, draft_tokens::DRAFT_TOKENS, error::EngineError};

/// The safetensors files of `directory`.
pub(super) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, EngineError> {
    match weights_in(directory)? {
        Weights::Safetensors(files) => Ok(files),
        Weights::Gguf(file) => Err(EngineError::model(&file, "give the path of this file as the model's")),
    }
}

/// Maps safetensors files; their headers are checked, so a truncated file is refused here.
fn map(files: &[PathBuf]) -> candle_core::Result<MmapedSafetensors> {
    #[expect(unsafe_code, reason = "weights are memory mapped")]
    // SAFETY: the files are mapped read-only and every tensor is copied out of the mapping while loading; like every
    // program that maps its weights we rely on nobody rewriting them during those seconds.
    unsafe {
        MmapedSafetensors::multi(files)
    }
}

/// Where the tensors are.
enum Files {
    Safetensors(MmapedSafetensors),
    PyTorch(PthTensors),
}

impl Files {
    /// Reads the pickle of a file as PyTorch saves it, and no values.
    fn unpickle(file: &Path) -> Result<Self, EngineError> {
        let tensors = PthTensors::new(file, None).map_err(|error| {
            let remedy = "fetch the file again, or save it anew with PyTorch 1.6 or later";
            EngineError::model(file, format!("unreadable weights: {error}; {remedy}"))
        })?;
        if tensors.tensor_infos().is_empty() {
            let problem = "no tensors by name in it; save the state dict itself, or its tensors as safetensors";
            return Err(EngineError::model(file, problem));
        }
        Ok(Self::PyTorch(tensors))
    }

    /// The shape of a tensor, if there is one of this name; its values are not read.
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self {
            Self::Safetensors(tensors) => tensors.get(name).ok().map(|tensor| tensor.shape().to_vec()),
            Self::PyTorch(tensors) => tensors.tensor_infos().get(name).map(|info| info.layout.dims().to_vec()),
        }
    }

    /// A tensor on the CPU, in the dtype that it is stored in.
    fn load(&self, name: &str) -> candle_core::Result<Tensor> {
        match self {
            Self::Safetensors(tensors) => tensors.load(name, &Device::Cpu),
            // One that was saved transposed comes as a view.
            Self::PyTorch(tensors) => match tensors.get(name)? {
                Some(tensor) => tensor.contiguous(),
                None => Err(Error::CannotFindTensor { path: name.to_owned() }),
            },
        }
    }
}

/// The tensors of a folder or a file, converted to one dtype and moved to the device.
pub(super) struct WeightFiles {
    path: PathBuf,
    files: Files,
    dtype: DType,
    isq: Option<IsqType>,
    device: Device,
    parameters: Cell<u64>,
}

impl WeightFiles {
    /// The safetensors of a folder.
    pub(super) fn open(
        directory: &Path,
        dtype: DType,
        isq: Option<IsqType>,
        device: &Device,
    ) -> Result<Self, EngineError> {
        Self::mapped(directory, &weight_files(directory)?, dtype, (isq, device))
    }

    /// The tensors of one file: of a safetensors file if that is its name's end, otherwise of one that PyTorch saved.
    pub(super) fn open_file(
        file: &Path,
        dtype: DType,
        isq: Option<IsqType>,
        device: &Device,
    ) -> Result<Self, EngineError> {
        match file.extension().is_some_and(|extension| extension == "safetensors") {
            true => Self::mapped(file, &[file.to_owned()], dtype, (isq, device)),
            false => Ok(Self::new(file, Files::unpickle(file)?, dtype, (isq, device))),
        }
    }

    fn mapped(
        path: &Path,
        files: &[PathBuf],
        dtype: DType,
        place: (Option<IsqType>, &Device),
    ) -> Result<Self, EngineError> {
        for file in files {
            map(std::slice::from_ref(file)).map_err(|error| EngineError::corrupt(file, error))?;
        }
        Ok(Self::new(path, Files::Safetensors(map(files)?), dtype, place))
    }

    fn new(path: &Path, files: Files, dtype: DType, (isq, device): (Option<IsqType>, &Device)) -> Self {
        Self { path: path.into(), files, dtype, isq, device: device.clone(), parameters: Cell::new(0) }
    }

    /// Whether there is a tensor of this name.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// The tokens below `vocab_size` that the model tells of, ascending; none if it tells of all.
    pub(super) fn draft_tokens(&self, vocab_size: usize) -> Result<Option<Vec<Token>>, EngineError> {
        if !self.contains(DRAFT_TOKENS) {
            return Ok(None);
        }
        let read = |tensor: Tensor| tensor.to_dtype(DType::U32)?.to_vec1::<Token>();
        let tokens = self.files.load(DRAFT_TOKENS).and_then(read);
        let invalid = |problem: &str| EngineError::corrupt(&self.path, format!("tensor {DRAFT_TOKENS}: {problem}"));
        let tokens = tokens.map_err(|error| invalid(&error.to_string()))?;
        match tokens.last() {
            Some(&last) if (last as usize) < vocab_size && tokens.is_sorted_by(|a, b| a < b) => Ok(Some(tokens)),
            _ => Err(invalid(&format!("not token ids below {vocab_size} in ascending order; train the model again"))),
        }
    }

    /// The shape of a tensor, if there is one of this name.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.files.shape(name)
    }
}

impl DenseTensors for WeightFiles {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError> {
        let own = self.shape(name).ok_or_else(|| EngineError::missing_tensor(&self.path, name))?;
        EngineError::check_shape(&self.path, name, shape, &own)?;
        let stored = self.files.load(name);
        let stored = stored.map_err(|error| EngineError::corrupt(&self.path, format!("tensor {name}: {error}")))?;
        let tensor = stored.to_dtype(self.dtype)?;
        self.parameters.set(self.parameters.get() + tensor.elem_count() as u64);
        Ok(tensor)
    }

    fn place(&self) -> (Option<IsqType>, &Device) {
        (self.isq, &self.device)
    }

    fn count(&self) -> u64 {
        self.parameters.get()
    }
}
