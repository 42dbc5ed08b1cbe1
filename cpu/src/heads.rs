//! Medusa's heads (Cai et al., arXiv:2401.10774, section 2.1.1): each tells the token so many places ahead from one
//! feature of the target, by residual blocks x + SiLU(W x + b) and a projection to the vocabulary.

use laser_decode::Draw;
use rayon::prelude::*;

use crate::{
    layer::{Loader, Projection, Tensors},
    sample::Weights,
    shape::{MedusaShape, ModelShape},
    skinny::{PackedMatrix, Rows},
    top_k::Predictions,
};

/// The heads. Memory: their weights, the target's projection to the vocabulary if they share it, and buffers for the
/// largest step.
#[derive(Debug)]
pub struct CpuHeads {
    hidden_size: usize,
    heads: Vec<Vec<Projection>>,
    /// One for all, or one for each.
    vocabularies: Vec<PackedMatrix>,
    buffers: Buffers,
}

/// The intermediate results of a step; their memory is kept for the next.
#[derive(Debug, Default)]
struct Buffers {
    /// Of one head.
    x: Rows,
    y: Rows,
    /// Of all heads that share a vocabulary, one head's rows behind the other's.
    stacked: Rows,
    /// For each vocabulary.
    logits: Vec<Rows>,
}

impl CpuHeads {
    /// Packs the weights: `medusa.HEAD.BLOCK.linear`, and behind the blocks `medusa.HEAD.BLOCKS.weight` where heads
    /// have vocabularies of their own.
    ///
    /// # Errors
    /// The first one of `tensors`.
    pub fn load<T: Tensors>(shape: &ModelShape, medusa: MedusaShape, tensors: &T) -> Result<Self, T::Error> {
        let (hidden, vocabulary) = (shape.hidden_size, shape.vocab_size);
        let loader = Loader(tensors);
        let block = |head, block| loader.projection(&[(format!("medusa.{head}.{block}.linear"), hidden)], hidden, true);
        let blocks = |head| (0..medusa.blocks).map(|at| block(head, at)).collect::<Result<Vec<_>, _>>();
        let names: Vec<String> = match (medusa.own_vocabulary, shape.tied_embeddings) {
            (true, _) => (0..medusa.heads).map(|head| format!("medusa.{head}.{}.weight", medusa.blocks)).collect(),
            (false, true) => vec!["model.embed_tokens.weight".to_owned()],
            (false, false) => vec!["lm_head.weight".to_owned()],
        };
        Ok(Self {
            hidden_size: hidden,
            heads: (0..medusa.heads).map(blocks).collect::<Result<_, _>>()?,
            vocabularies: names.iter().map(|name| loader.matrix(name, vocabulary, hidden)).collect::<Result<_, _>>()?,
            buffers: Buffers::default(),
        })
    }

    /// For each of the features `[rows, hidden_size]` what every head says, nearest first: its `top_k` most probable
    /// tokens (at most the vocabulary) and its prediction. Runs on the rayon threads that it is called on.
    pub fn forward(&mut self, features: &[f32], top_k: usize, draws: &[Option<Draw>]) -> Predictions {
        let rows = draws.len();
        self.logits(features, rows);
        let (heads, logits) = (self.heads.len(), &self.buffers.logits);
        let shares = self.vocabularies.len() == 1;
        let predict = |weights: &mut Weights, at: usize| {
            let (row, head) = (at / heads, at % heads);
            let logits = if shares { logits[0].row(head * rows + row) } else { logits[head].row(row) };
            let mut predictions = Predictions::default();
            predictions.push_with(logits, top_k, draws[row], weights);
            predictions
        };
        let found: Vec<Predictions> = (0..rows * heads).into_par_iter().map_init(Weights::new, predict).collect();
        let mut predictions = Predictions::default();
        found.into_iter().for_each(|one| predictions.append(one));
        predictions
    }

    fn logits(&mut self, features: &[f32], rows: usize) {
        let (width, Buffers { x, y, stacked, logits }) = (self.hidden_size, &mut self.buffers);
        logits.resize_with(self.vocabularies.len(), Rows::default);
        stacked.reshape(rows * self.heads.len(), width);
        for (head, blocks) in self.heads.iter().enumerate() {
            x.reshape(rows, width);
            features.chunks_exact(width).enumerate().for_each(|(row, from)| x.row_mut(row).copy_from_slice(from));
            for block in blocks {
                block.forward(x, y);
                x.each(false, |row, x| x.iter_mut().zip(y.row(row)).for_each(|(x, y)| *x += silu(*y)));
            }
            if self.vocabularies.len() > 1 {
                self.vocabularies[head].multiply(x, &mut logits[head]);
            }
            (0..rows).for_each(|row| stacked.row_mut(head * rows + row).copy_from_slice(x.row(row)));
        }
        if let [vocabulary] = &self.vocabularies[..] {
            vocabulary.multiply(stacked, &mut logits[0]);
        }
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
