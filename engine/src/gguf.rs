//! Weights of a GGUF file, mapped: quantised tensors stay as they are, norms and embeddings become f32, or the type of
//! a GPU's activations.
//!
//! Llama files store the rows of q and k for interleaved rotary embeddings. Rows are permuted back while loading (rows
//! are independent in every GGUF block format, so this is exact), which leaves one rotary layout to the forward; Qwen
//! files need nothing. Memory beside the mapping: the file's size, and 4 bytes for every element of the embedding.

use std::{
    borrow::Cow,
    cell::Cell,
    fs::File,
    io::{self, BufReader, Cursor},
    path::{Path, PathBuf},
};

use candle_core::{
    DType, Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{Content, TensorInfo, Value},
    },
};
use laser_cpu::{Format, Matrix, ModelShape, RopeScaling};
use memmap2::Mmap;

use crate::{
    architecture::Architecture,
    blocks::{format_of, tensor},
    config::{ModelConfig, architecture},
    error::EngineError,
    linear::Linear,
    tree_lm::Weights,
};

/// GGUF names of a layer's parts.
const PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// `model.layers.3.self_attn.q_proj` is called `blk.3.attn_q`.
fn gguf_name(name: &str) -> String {
    let part = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    match part {
        Some((layer, part)) => {
            let known = PARTS.iter().find(|(ours, _)| *ours == part);
            format!("blk.{layer}.{}", known.map_or(part, |(_, theirs)| theirs))
        }
        None if name == "model.norm" => "output_norm".into(),
        None => name.into(),
    }
}

/// Maps a file. Workers of one host share its pages.
#[expect(unsafe_code, reason = "weights are memory mapped")]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the file is mapped read-only and every tensor is copied out of the mapping while loading; like every
    // program that maps its weights we rely on nobody rewriting them during those seconds.
    unsafe { Mmap::map(&file) }
}

/// The most positions of a sequence for the model of a GGUF file, no more than a sliding window has; reads the header.
/// `None` if the tree engine does not run the model; [`load`](crate::load) says why.
pub fn gguf_positions(path: &Path) -> Option<usize> {
    let content = Content::read(&mut BufReader::new(File::open(path).ok()?)).ok()?;
    Some(Header { path, content: &content }.config().ok()?.max_positions)
}

/// The bytes of a tensor, unless the file ends before they do. They begin at a multiple of 4, as candle's blocks must:
/// tensors of a mapped file do by its alignment, and are copied if it has another one.
fn bytes_of<'a>(file: &'a [u8], content: &Content, info: &TensorInfo) -> Option<Cow<'a, [u8]>> {
    let dtype = info.ggml_dtype;
    let from = usize::try_from(content.tensor_data_offset.checked_add(info.offset)?).ok()?;
    let length = (info.shape.elem_count() / dtype.block_size()).checked_mul(dtype.type_size())?;
    let bytes = file.get(from..)?.get(..length)?;
    match bytes.as_ptr().addr().is_multiple_of(4) {
        true => Some(Cow::Borrowed(bytes)),
        false => Some(Cow::Owned(bytes.to_vec())),
    }
}

/// A tensor as the file has it.
struct Stored<'a> {
    bytes: Cow<'a, [u8]>,
    info: &'a TensorInfo,
}

impl Stored<'_> {
    /// The matrix with these rows, without requantising.
    fn with_rows(self, rows: &[u32]) -> Self {
        let row_bytes = self.bytes.len() / rows.len();
        let moved = rows.iter().map(|&row| &self.bytes[row as usize * row_bytes..][..row_bytes]);
        let moved = moved.collect::<Vec<&[u8]>>().concat();
        Self { bytes: Cow::Owned(moved), info: self.info }
    }

    /// A copy on the CPU.
    fn tensor(&self) -> candle_core::Result<QTensor> {
        tensor(&self.bytes, self.info.ggml_dtype, &self.info.shape)
    }
}

/// A mapped GGUF file.
pub(super) struct GgufWeights {
    path: PathBuf,
    mapping: Mmap,
    content: Content,
    config: ModelConfig,
    device: Device,
    /// Of activations, and so of what is not quantised.
    dtype: DType,
    parameters: Cell<u64>,
}

impl GgufWeights {
    pub(super) fn open(path: &Path, dtype: DType, device: &Device) -> Result<Self, EngineError> {
        let corrupt = |error: candle_core::Error| EngineError::corrupt(path, error);
        let mapping = map(path).map_err(|error| EngineError::corrupt(path, error))?;
        let mut reader = Cursor::new(&mapping[..]);
        let content = Content::read(&mut reader).map_err(corrupt)?;
        let header = Header { path, content: &content };
        let mut config = header.config()?;
        let name = "rope_freqs.weight";
        if content.tensor_infos.contains_key(name) {
            let factors: Vec<f32> = content
                .tensor(&mut reader, name, &Device::Cpu)
                .and_then(|factors| factors.dequantize(&Device::Cpu)?.to_vec1())
                .map_err(corrupt)?;
            let (expected, found) = (config.shape.head_dim / 2, factors.len());
            if found < expected {
                return Err(EngineError::corrupt(path, format!("{name}: {found} factors, expected {expected}")));
            }
            config.shape.rope_scaling = RopeScaling::Factors(factors);
        }
        let (path, device) = (path.into(), device.clone());
        Ok(Self { path, mapping, content, config, device, dtype, parameters: Cell::new(0) })
    }

    /// The model the header describes.
    pub(super) fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Tensor `name`, of exactly this shape.
    fn get(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, EngineError> {
        let info = self.content.tensor_infos.get(name);
        let info = info.ok_or_else(|| EngineError::missing_tensor(&self.path, name))?;
        EngineError::check_shape(&self.path, name, shape, info.shape.dims())?;
        self.parameters.set(self.parameters.get() + shape.iter().product::<usize>() as u64);
        let corrupt = |message: &str| EngineError::corrupt(&self.path, format!("{name}: {message}"));
        let block = info.ggml_dtype.block_size();
        if !shape.last().is_some_and(|width| width.is_multiple_of(block)) {
            return Err(corrupt(&format!("rows are not whole blocks of {block} weights")));
        }
        let bytes = bytes_of(&self.mapping, &self.content, info);
        Ok(Stored { bytes: bytes.ok_or_else(|| corrupt("the file ends before the tensor does"))?, info })
    }

    /// The types of the matrices that are multiplied with.
    pub(super) fn matrix_types(&self) -> impl Iterator<Item = GgmlDType> + '_ {
        let is_looked_up = |name: &str| name == "token_embd.weight" && !self.config.shape.tied_embeddings;
        let infos = self.content.tensor_infos.iter();
        infos.filter(move |(name, info)| info.shape.rank() == 2 && !is_looked_up(name)).map(|(_, info)| info.ggml_dtype)
    }

    /// The format of the matrices that are multiplied with, or of the first of them if they differ, if the kernels have
    /// one for each.
    pub(super) fn format(&self) -> Option<Format> {
        let shape = &self.config.shape;
        let formats = self.matrix_types().map(format_of).collect::<Option<Vec<_>>>()?;
        // Parts of a projection that differ begin with panels of their own.
        let whole_panels =
            [shape.query_width(), shape.key_width(), shape.intermediate_size].iter().all(|width| width % 16 == 0);
        let first = *formats.first()?;
        (whole_panels || formats.iter().all(|format| *format == first)).then_some(first)
    }

    /// Tensor `name` on the device in the dtype of activations.
    fn dense(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError> {
        Ok(self.unpacked(&self.get(name, shape)?.tensor()?)?)
    }

    fn unpacked(&self, weight: &QTensor) -> candle_core::Result<Tensor> {
        weight.dequantize(&Device::Cpu)?.to_dtype(self.dtype)?.to_device(&self.device)
    }

    /// Heads whose rows are interleaved in projection `name`.
    fn interleaved_heads(&self, name: &str) -> Option<usize> {
        match (self.config.architecture, name.rsplit('.').next()) {
            (Architecture::Llama, Some("q_proj")) => Some(self.config.shape.heads),
            (Architecture::Llama, Some("k_proj")) => Some(self.config.shape.kv_heads),
            _ => None,
        }
    }

    /// The tensor of that name at Hugging Face, its rows as they are there.
    fn halved(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, EngineError> {
        let part = name.rsplit_once('.').map_or(name, |(part, _)| part);
        let renamed = match part {
            "model.embed_tokens" => "token_embd.weight".to_owned(),
            "lm_head" => "output.weight".to_owned(),
            part => name.replacen(part, &gguf_name(part), 1),
        };
        let stored = self.get(&renamed, shape)?;
        match self.interleaved_heads(part) {
            Some(heads) => Ok(stored.with_rows(&halved_rows(shape[0], heads))),
            None => Ok(stored),
        }
    }

    /// A GPU has weights that are not quantised in the dtype of activations.
    fn quantised(&self, weight: Stored<'_>, bias: Option<Tensor>) -> Result<Linear, EngineError> {
        let weight = weight.tensor()?;
        Ok(match weight.dtype() {
            GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 if self.device.is_cuda() => {
                Linear::dense(self.unpacked(&weight)?, bias, None, &self.device)?
            }
            _ => Linear::quantised(weight, bias, &self.device)?,
        })
    }
}

impl Weights for GgufWeights {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        Ok(self.halved(name, shape)?.tensor()?.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?)
    }

    fn matrix(&self, name: &str, shape: [usize; 2], _: Format) -> Result<Matrix, EngineError> {
        let stored = self.halved(name, &shape)?;
        match format_of(stored.info.ggml_dtype) {
            Some(format) => Ok(Matrix::Blocks(stored.bytes.into_owned(), format)),
            None => Err(EngineError::corrupt(&self.path, format!("{name}: blocks of another type"))),
        }
    }

    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        let gguf = gguf_name(name);
        let mut weight = self.get(&format!("{gguf}.weight"), &[outputs, inputs])?;
        let mut bias = match bias {
            true => Some(self.dense(&format!("{gguf}.bias"), &[outputs])?),
            false => None,
        };
        if let Some(heads) = self.interleaved_heads(name) {
            let rows = halved_rows(outputs, heads);
            weight = weight.with_rows(&rows);
            if let Some(bias) = &mut bias {
                *bias = bias.index_select(&Tensor::new(rows, &self.device)?, 0)?;
            }
        }
        self.quantised(weight, bias)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        self.dense(&format!("{}.weight", gguf_name(name)), &[length])
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        self.dense("token_embd.weight", &[rows, width])
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        let (rows, width) = embedding.dims2()?;
        let name = if tied { "token_embd.weight" } else { "output.weight" };
        let counted = self.parameters.get();
        let weight = self.get(name, &[rows, width])?;
        if tied {
            self.parameters.set(counted);
        }
        self.quantised(weight, None)
    }

    fn parameters(&self) -> u64 {
        self.parameters.get()
    }
}

/// For every row of the halved layout (first halves of all pairs of a head, then second halves) its
/// row in the interleaved one.
fn halved_rows(rows: usize, heads: usize) -> Vec<u32> {
    let dim = rows / heads;
    let source = |row: usize| {
        let (head, within) = (row / dim, row % dim);
        let (half, pair) = (within / (dim / 2), within % (dim / 2));
        head * dim + 2 * pair + half
    };
    (0..rows).map(|row| u32::try_from(source(row)).unwrap_or(u32::MAX)).collect()
}

/// The metadata of a GGUF file.
struct Header<'a> {
    path: &'a Path,
    content: &'a Content,
}

impl Header<'_> {
    fn config(&self) -> Result<ModelConfig, EngineError> {
        let name = self
            .text("general.architecture")
            .ok_or_else(|| self.invalid("key general.architecture is missing".into()))?;
        let architecture = architecture(self.path, &name)?;
        let key = |key: &str| format!("{name}.{key}");
        let size = |name: &str| self.size(&key(name));
        let (heads, hidden_size) = (size("attention.head_count")?, size("embedding_length")?);
        let optional = |name: &str| self.optional_size(&key(name));
        let window = optional("attention.sliding_window").filter(|&window| window > 0);
        let embedding = self.content.tensor_infos.get("token_embd.weight");
        let has = |tensor: &str| self.content.tensor_infos.contains_key(tensor);
        let shape = ModelShape {
            vocab_size: embedding.map_or(0, |info| info.shape.dims()[0]),
            hidden_size,
            intermediate_size: size("feed_forward_length")?,
            layers: size("block_count")?,
            heads,
            kv_heads: optional("attention.head_count_kv").unwrap_or(heads),
            head_dim: optional("attention.key_length").unwrap_or(hidden_size / heads.max(1)),
            norm_eps: f64::from(self.float(&key("attention.layer_norm_rms_epsilon"))?),
            rope_theta: self.float(&key("rope.freq_base")).unwrap_or(10_000.0),
            rope_scaling: self.rope_scaling(&name)?,
            tied_embeddings: !has("output.weight"),
            qkv_bias: has("blk.0.attn_q.bias"),
            output_bias: has("blk.0.attn_output.bias"),
            mlp_bias: has("blk.0.ffn_gate.bias"),
            head_norms: architecture == Architecture::Qwen3,
            fused: None,
            medusa: None,
        };
        let max_positions = size("context_length")?.min(window.unwrap_or(usize::MAX));
        ModelConfig { architecture, architecture_name: name, max_positions, shape }.validate(self.path)
    }

    fn rope_scaling(&self, architecture: &str) -> Result<RopeScaling, EngineError> {
        match self.text(&format!("{architecture}.rope.scaling.type")).as_deref() {
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") => {
                let factor = self.float(&format!("{architecture}.rope.scaling.factor"))?;
                Ok(RopeScaling::Linear { factor })
            }
            Some(other) => {
                Err(self.invalid(format!("rope scaling type {other:?} is not supported (supported: none, linear)")))
            }
        }
    }

    fn text(&self, key: &str) -> Option<String> {
        self.content.metadata.get(key).and_then(|value| value.to_string().ok().cloned())
    }

    fn optional_size(&self, key: &str) -> Option<usize> {
        let value = self.content.metadata.get(key)?;
        value.to_u64().ok().and_then(|value| usize::try_from(value).ok())
    }

    fn size(&self, key: &str) -> Result<usize, EngineError> {
        self.optional_size(key).ok_or_else(|| self.invalid(format!("key {key} is missing or not a size")))
    }

    fn float(&self, key: &str) -> Result<f32, EngineError> {
        match self.content.metadata.get(key) {
            Some(Value::F32(value)) => Ok(*value),
            _ => Err(self.invalid(format!("key {key} is missing or not an f32"))),
        }
    }

    fn invalid(&self, message: String) -> EngineError {
        EngineError::model(self.path, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_gguf_convention() {
        for (ours, theirs) in [
            ("model.layers.12.self_attn.q_norm", "blk.12.attn_q_norm"),
            ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
            ("model.norm", "output_norm"),
        ] {
            assert_eq!(gguf_name(ours), theirs);
        }
    }

    #[test]
    fn interleaved_rows_are_put_back_into_halves() {
        // Two heads of 4: pairs (0,1) and (2,3) of a head rotate together.
        assert_eq!(halved_rows(8, 2), [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
