//! The weights of a layer, and how they are loaded.

use crate::{
    shape::ModelShape,
    skinny::{Format, Matrix, PackedMatrix, Rows},
};

/// Where a model's tensors come from, by their names at Hugging Face.
pub trait Tensors {
    /// Why a tensor cannot be had.
    type Error;

    /// The values of the tensor of that name, which must have that shape.
    ///
    /// # Errors
    /// If there is none of that shape.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Self::Error>;

    /// The matrix `[outputs, inputs]` of that name, in the format to be stored in. A projection whose parts differ in
    /// format must have multiples of 16 outputs in each.
    ///
    /// # Errors
    /// As above.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Matrix, Self::Error>;
}

/// A projection and its bias.
#[derive(Debug)]
pub(crate) struct Projection {
    /// One below the other; neighbours differ in format.
    weights: Vec<PackedMatrix>,
    bias: Option<Vec<f32>>,
}

impl Projection {
    /// The format of its first weights.
    pub(crate) fn format(&self) -> Format {
        self.weights.first().map_or(Format::F32, PackedMatrix::format)
    }

    /// `y = x Wᵀ + b`.
    pub(crate) fn forward(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows(), self.weights.iter().map(PackedMatrix::outputs).sum());
        let mut first = 0;
        for weights in &self.weights {
            weights.multiply_into(x, y, first);
            first += weights.outputs();
        }
        let Some(bias) = &self.bias else { return };
        y.each(false, |_, row| {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        });
    }
}

/// The weights of a layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Option<Vec<f32>>,
    /// Norms of single heads: of the queries, of the keys.
    pub(crate) head_norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Queries, keys and values, one below the other.
    pub(crate) qkv: Projection,
    pub(crate) output: Projection,
    pub(crate) mlp_norm: Vec<f32>,
    /// Gate and up, one below the other.
    pub(crate) gate_up: Projection,
    pub(crate) down: Projection,
}

/// Loads and packs weights.
pub(crate) struct Loader<'a, T>(pub(crate) &'a T);

impl<T: Tensors> Loader<'_, T> {
    /// A matrix `[outputs, inputs]`.
    pub(crate) fn matrix(&self, name: &str, outputs: usize, inputs: usize) -> Result<PackedMatrix, T::Error> {
        Ok(PackedMatrix::pack(&[self.0.matrix(name, [outputs, inputs])?], inputs))
    }

    /// The projections `parts` (name and outputs) from the same `inputs`, as one.
    pub(crate) fn projection(
        &self,
        parts: &[(String, usize)],
        inputs: usize,
        bias: bool,
    ) -> Result<Projection, T::Error> {
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (name, outputs) in parts {
            weights.push(self.0.matrix(&format!("{name}.weight"), [*outputs, inputs])?);
            if bias {
                biases.extend(self.0.values(&format!("{name}.bias"), &[*outputs])?);
            }
        }
        let weights = weights.chunk_by(|a, b| a.format() == b.format());
        let weights = weights.map(|parts| PackedMatrix::pack(parts, inputs)).collect();
        Ok(Projection { weights, bias: bias.then_some(biases) })
    }

    pub(crate) fn layer(&self, shape: &ModelShape, layer: usize) -> Result<Layer, T::Error> {
        let (hidden, inner) = (shape.hidden_size, shape.intermediate_size);
        let (queries, keys) = (shape.query_width(), shape.key_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |part: &str, length| self.0.values(&format!("{}.weight", name(part)), &[length]);
        let qkv = [("q", queries), ("k", keys), ("v", keys)];
        let qkv = qkv.map(|(part, outputs)| (name(&format!("self_attn.{part}_proj")), outputs));
        let gate_up = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), inner));
        let output = [(name("self_attn.o_proj"), hidden)];
        let down = [(name("mlp.down_proj"), hidden)];
        Ok(Layer {
            attention_norm: match (shape.fused, layer) {
                (Some(_), 0) => None,
                _ => Some(norm("input_layernorm", hidden)?),
            },
            head_norms: match shape.head_norms {
                true => Some((norm("self_attn.q_norm", shape.head_dim)?, norm("self_attn.k_norm", shape.head_dim)?)),
                false => None,
            },
            qkv: self.projection(&qkv, hidden, shape.qkv_bias)?,
            output: self.projection(&output, queries, shape.output_bias)?,
            mlp_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: self.projection(&gate_up, hidden, shape.mlp_bias)?,
            down: self.projection(&down, inner, shape.mlp_bias)?,
        })
    }
}
