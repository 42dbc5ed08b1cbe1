//! Weights of a Hugging Face model directory, mapped and converted tensor by tensor.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use mistralrs_quant::{IsqType, ShardedSafeTensors, ShardedVarBuilder};
use serde::Deserialize;
use serde_json::Value;

use crate::{dense::DenseTensors, error::EngineError};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weight files of `directory`: those the index names, or the single one.
pub(super) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let index = directory.join(INDEX);
    let names = if index.is_file() { read_index(&index)? } else { BTreeSet::from([SINGLE.to_owned()]) };
    for file in &names {
        if !directory.join(file).is_file() {
            return Err(EngineError::MissingFile {
                directory: directory.into(),
                file: file.clone(),
                remedy: format!("weights must be {SINGLE}, or the files that {INDEX} names"),
            });
        }
    }
    Ok(names.iter().map(|name| directory.join(name)).collect())
}

fn read_index(index: &Path) -> Result<BTreeSet<String>, EngineError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = fs::read_to_string(index).map_err(|error| EngineError::model(index, error.to_string()))?;
    let parsed: Index = serde_json::from_str(&text).map_err(|error| EngineError::model(index, error.to_string()))?;
    Ok(parsed.weight_map.into_values().collect())
}

/// The shapes of a file's tensors by their names; no tensor is read.
pub(super) fn shapes(file: &Path) -> Result<BTreeMap<String, Vec<usize>>, EngineError> {
    let header = read_header(file).map_err(|error| EngineError::corrupt(file, error))?;
    let shape = |tensor: &Value| serde_json::from_value(tensor["shape"].clone()).ok();
    Ok(header.into_iter().filter_map(|(name, tensor)| Some((name, shape(&tensor)?))).collect())
}

/// A file begins with eight bytes that tell the length of its header, which is JSON.
fn read_header(file: &Path) -> io::Result<BTreeMap<String, Value>> {
    let mut file = File::open(file)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut header = Vec::new();
    file.take(u64::from_le_bytes(length)).read_to_end(&mut header)?;
    Ok(serde_json::from_slice(&header)?)
}

/// Maps files; their headers are checked, so a truncated file is refused here.
fn map(files: &[PathBuf], dtype: DType) -> candle_core::Result<ShardedVarBuilder> {
    #[expect(unsafe_code, reason = "weights are memory mapped")]
    // SAFETY: the files are mapped read-only and every tensor is copied out of the mapping while loading; like every
    // program that maps its weights we rely on nobody rewriting them during those seconds.
    unsafe {
        ShardedSafeTensors::sharded(files, dtype, &Device::Cpu, None, Arc::new(|_| true))
    }
}

/// The tensors of a model directory, converted to one dtype and moved to the device.
pub(super) struct SafetensorsWeights {
    path: PathBuf,
    tensors: ShardedVarBuilder,
    isq: Option<IsqType>,
    device: Device,
    parameters: Cell<u64>,
}

impl SafetensorsWeights {
    pub(super) fn open(
        directory: &Path,
        dtype: DType,
        isq: Option<IsqType>,
        device: &Device,
    ) -> Result<Self, EngineError> {
        let files = weight_files(directory)?;
        Self::of(directory, &files, dtype, (isq, device))
    }

    /// The tensors of one file.
    pub(super) fn open_file(
        file: &Path,
        dtype: DType,
        isq: Option<IsqType>,
        device: &Device,
    ) -> Result<Self, EngineError> {
        Self::of(file, &[file.to_owned()], dtype, (isq, device))
    }

    fn of(
        path: &Path,
        files: &[PathBuf],
        dtype: DType,
        (isq, device): (Option<IsqType>, &Device),
    ) -> Result<Self, EngineError> {
        for file in files {
            map(std::slice::from_ref(file), dtype).map_err(|error| EngineError::corrupt(file, error))?;
        }
        let tensors = map(files, dtype)?;
        Ok(Self { path: path.into(), tensors, isq, device: device.clone(), parameters: Cell::new(0) })
    }

    /// Whether there is a tensor of this name.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_tensor(name)
    }
}

impl DenseTensors for SafetensorsWeights {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError> {
        if !self.tensors.contains_tensor(name) {
            return Err(EngineError::missing_tensor(&self.path, name));
        }
        let tensor = self.tensors.get_unchecked(name)?.to_dtype(self.tensors.dtype())?;
        EngineError::check_shape(&self.path, name, shape, tensor.dims())?;
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
