//! A model whose weights are rounded as a quantisation rounds them, kept in f32: what that costs apart from the
//! rounding of activations, which the kernels of quantised weights do as well.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const EMBEDDING: &str = "model.embed_tokens.weight";
const UNEMBEDDING: &str = "lm_head.weight";

/// The blocks that a quantisation stores weights in, of those that the CPU's kernels multiply with.
pub(super) fn blocks(quantisation: &str) -> Option<GgmlDType> {
    match quantisation.to_lowercase().as_str() {
        "q8_0" => Some(GgmlDType::Q8_0),
        "q4_0" => Some(GgmlDType::Q4_0),
        "q4k" => Some(GgmlDType::Q4K),
        "q5k" => Some(GgmlDType::Q5K),
        "q6k" => Some(GgmlDType::Q6K),
        _ => None,
    }
}

/// Writes the model of one model.safetensors with its matrices rounded into the folder `to`. Embeddings are looked up
/// as they are.
///
/// # Errors
/// Files that cannot be read or written.
pub(super) fn write(model: &Path, blocks: GgmlDType, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in fs::read_dir(model).with_context(|| model.display().to_string())? {
        let file = entry?.path();
        if let Some(name) = file.file_name().filter(|name| *name != WEIGHTS && *name != CONFIG && file.is_file()) {
            fs::copy(&file, to.join(name)).with_context(|| file.display().to_string())?;
        }
    }
    let file = model.join(WEIGHTS);
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).with_context(|| file.display().to_string())?;
    let rounded = rounded(tensors, blocks).with_context(|| file.display().to_string())?;
    candle_core::safetensors::save(&rounded, to.join(WEIGHTS))?;
    let file = model.join(CONFIG);
    let config: Value = serde_json::from_slice(&fs::read(&file)?).with_context(|| file.display().to_string())?;
    Ok(fs::write(to.join(CONFIG), untied(config).to_string())?)
}

fn rounded(mut tensors: HashMap<String, Tensor>, blocks: GgmlDType) -> candle_core::Result<HashMap<String, Tensor>> {
    if !tensors.contains_key(UNEMBEDDING)
        && let Some(embedding) = tensors.get(EMBEDDING).cloned()
    {
        tensors.insert(UNEMBEDDING.to_owned(), embedding);
    }
    let round = |(name, tensor): (String, Tensor)| {
        let tensor = tensor.to_dtype(DType::F32)?;
        let tensor = match tensor.rank() == 2 && name != EMBEDDING {
            true => QTensor::quantize(&tensor, blocks)?.dequantize(&Device::Cpu)?,
            false => tensor,
        };
        Ok((name, tensor))
    };
    tensors.into_iter().map(round).collect()
}

fn untied(mut config: Value) -> Value {
    config["tie_word_embeddings"] = json!(false);
    config
}
