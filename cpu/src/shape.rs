//! The shape and the constants of a decoder.

use crate::rope::RopeScaling;

/// All that a forward depends on beside the weights.
#[derive(Debug, Clone)]
pub struct ModelShape {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; they divide the query heads.
    pub kv_heads: usize,
    /// Width of a head, an even number.
    pub head_dim: usize,
    /// Added to the mean square before the root of every norm.
    pub norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f32,
    /// How its frequencies were changed.
    pub rope_scaling: RopeScaling,
    /// The projection to the vocabulary is the embedding.
    pub tied_embeddings: bool,
    /// Bias on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Bias on the three projections of the MLP.
    pub mlp_bias: bool,
    /// A norm on every head of q and k.
    pub head_norms: bool,
    /// An EAGLE layer (arXiv:2401.15077, section 4.1): what enters is a projection of each token's embedding and the
    /// feature of the token before it, the first attention and the vocabulary have no norm before them. `Some(true)` if
    /// the projection has a bias.
    pub fused: Option<bool>,
    /// Not a decoder, but Medusa's heads over the features of one of this shape.
    pub medusa: Option<MedusaShape>,
}

/// Medusa's heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MedusaShape {
    /// Heads: so many tokens ahead are told.
    pub heads: usize,
    /// Residual blocks of a head.
    pub blocks: usize,
    /// Whether each head has a projection to the vocabulary of its own, or all have the target's.
    pub own_vocabulary: bool,
}

impl ModelShape {
    /// Outputs of the query projection.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Outputs of the key projection, and of the value projection.
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two layers of two heads.
    pub(crate) fn tiny() -> ModelShape {
        ModelShape {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 16,
            layers: 2,
            heads: 2,
            kv_heads: 2,
            head_dim: 4,
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            tied_embeddings: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            head_norms: false,
            fused: None,
            medusa: None,
        }
    }
}
