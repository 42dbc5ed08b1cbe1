//! Weights of a Hugging Face model directory, mapped and converted tensor by tensor.

use std::{
    cell::Cell,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use mistralrs_quant::{IsqType, ShardedSafeTensors, ShardedVarBuilder};
use serde::Deserialize;

use crate::{error::EngineError, linear::Linear, tree_lm::Weights};

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
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = fs::read_to_string(index).map_err(|error| EngineError::model(index, error.to_string()))?;
    let parsed: Index = serde_json::from_str(&text).map_err(|error| EngineError::model(index, error.to_string()))?;
    Ok(parsed.weight_map.into_values().collect())
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
        for file in &files {
            map(std::slice::from_ref(file), dtype).map_err(|error| EngineError::corrupt(file, error))?;
        }
        let tensors = map(&files, dtype)?;
        let (path, device) = (directory.into(), device.clone());
        Ok(Self { path, tensors, isq, device, parameters: Cell::new(0) })
    }

    /// Tensor `name` on the CPU, of exactly this shape.
    fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError> {
        if !self.tensors.contains_tensor(name) {
            return Err(EngineError::missing_tensor(&self.path, name));
        }
        let tensor = self.tensors.get_unchecked(name)?.to_dtype(self.tensors.dtype())?;
        EngineError::check_shape(&self.path, name, shape, tensor.dims())?;
        self.parameters.set(self.parameters.get() + tensor.elem_count() as u64);
        Ok(tensor)
    }
}

impl Weights for SafetensorsWeights {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        Ok(self.get(name, shape)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
    }

    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        let mut weight = self.get(&format!("{name}.weight"), &[outputs, inputs])?;
        // Quantisation runs on the CPU, on the weights as they come.
        if self.isq.is_none() {
            weight = weight.to_device(&self.device)?;
        }
        let bias = match bias {
            true => Some(self.get(&format!("{name}.bias"), &[outputs])?.to_device(&self.device)?),
            false => None,
        };
        Ok(Linear::dense(weight, bias, self.isq, &self.device)?)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        Ok(self.get(&format!("{name}.weight"), &[length])?.to_device(&self.device)?)
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        Ok(self.get("model.embed_tokens.weight", &[rows, width])?.to_device(&self.device)?)
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        let (rows, width) = embedding.dims2()?;
        if tied {
            return Ok(Linear::dense(embedding.clone(), None, self.isq, &self.device)?);
        }
        self.linear("lm_head", rows, width, false)
    }

    fn parameters(&self) -> u64 {
        self.parameters.get()
    }
}
