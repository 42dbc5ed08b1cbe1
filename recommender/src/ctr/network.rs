//! The two networks over the same features.

use candle_core::{Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::data::Data;
use super::knowledge::{Feature, Variant};
use super::layers::{Cross, Deep, Dropout, Embedding, Linear, Parameters};
use super::{ModelKind, TrainingConfig};

/// The hidden width of DIN's activation unit, as in its paper.
const ATTENTION: usize = 36;

/// The features of some impressions.
#[derive(Debug)]
pub(super) struct Batch {
    /// Impressions.
    rows: usize,
    /// `[rows]` tokens.
    user: Tensor,
    /// `[rows]` tokens.
    item: Tensor,
    /// `[rows]` indices, for knowledge.
    user_index: Tensor,
    /// `[rows]` indices, for knowledge.
    item_index: Tensor,
    /// `[rows · history]` tokens.
    history: Tensor,
    /// `[rows · history]`: whether the user liked the item, as 0 or 1.
    responses: Tensor,
    /// `[rows, history]`: 1 if there is an item.
    present: Tensor,
    /// `[rows]`: 0 or 1.
    pub(super) labels: Tensor,
}

impl Batch {
    /// Creates a batch of the impressions at these positions; in training some ids are treated as unknown.
    pub(super) fn new(
        data: &Data,
        positions: &[usize],
        config: &TrainingConfig,
        rng: Option<&mut Xoshiro256PlusPlus>,
    ) -> Result<Self> {
        let (rows, length) = (positions.len(), config.history);
        let impressions = || positions.iter().map(|&position| data.impression(position));
        let mut users: Vec<u32> = impressions().map(|i| data.user_token(i.user)).collect();
        let mut items: Vec<u32> = impressions().map(|i| data.item_token(i.item)).collect();
        if let Some(rng) = rng {
            for token in users.iter_mut().chain(&mut items) {
                if rng.gen_bool(config.id_dropout) {
                    *token = 0;
                }
            }
        }
        let mut history = vec![0; rows * length];
        let mut responses = vec![0; rows * length];
        let mut present = vec![0f32; rows * length];
        for (row, &position) in positions.iter().enumerate() {
            for (place, seen) in (row * length..).zip(data.history(position, length)) {
                history[place] = data.item_token(seen.item);
                responses[place] = u32::from(seen.label);
                present[place] = 1.0;
            }
        }
        let labels: Vec<f32> = impressions().map(|i| f32::from(u8::from(i.label))).collect();
        let cpu = &Device::Cpu;
        Ok(Self {
            rows,
            user: Tensor::new(users, cpu)?,
            item: Tensor::new(items, cpu)?,
            user_index: Tensor::new(impressions().map(|i| i.user).collect::<Vec<_>>(), cpu)?,
            item_index: Tensor::new(impressions().map(|i| i.item).collect::<Vec<_>>(), cpu)?,
            history: Tensor::new(history, cpu)?,
            responses: Tensor::new(responses, cpu)?,
            present: Tensor::from_vec(present, (rows, length), cpu)?,
            labels: Tensor::new(labels, cpu)?,
        })
    }
}

/// A CTR model with its features.
#[derive(Debug)]
pub(super) struct Network {
    users: Embedding,
    items: Embedding,
    responses: Embedding,
    knowledge: [Option<KnowledgeField>; 2],
    head: Head,
    pub(super) parameters: Parameters,
}

/// The part that computes a logit from the features.
#[derive(Debug)]
enum Head {
    Din { attention: Attention, deep: Deep, output: Linear },
    DcnV2 { cross: Cross, deep: Deep, output: Linear },
}

impl Network {
    pub(super) fn new(
        kind: ModelKind,
        data: &Data,
        variant: &Variant,
        config: &TrainingConfig,
        seed: u64,
    ) -> Result<Self> {
        let mut parameters = Parameters { rng: Xoshiro256PlusPlus::seed_from_u64(seed), vars: Vec::new() };
        let (dimension, with) = (config.dimension, &mut parameters);
        let users = Embedding::new(data.users() + 1, dimension, with)?;
        let items = Embedding::new(data.items() + 1, dimension, with)?;
        let responses = Embedding::new(2, dimension, with)?;
        let mut field = |feature: &Option<Feature>, entities: usize| {
            let of = |feature| KnowledgeField::new(feature, entities, dimension, with);
            feature.as_ref().map(of).transpose()
        };
        let knowledge = [field(&variant.user, data.users())?, field(&variant.item, data.items())?];
        let known: usize = knowledge.iter().flatten().map(|field| field.width).sum();
        let inputs = 3 * dimension + known;
        let deep = Deep::new(inputs, &config.hidden, with)?;
        let deepest = config.hidden.last().copied().unwrap_or(inputs);
        let head = match kind {
            ModelKind::Din => {
                Head::Din { attention: Attention::new(dimension, with)?, deep, output: Linear::new(deepest, 1, with)? }
            }
            ModelKind::DcnV2 => Head::DcnV2 {
                cross: Cross::new(inputs, config.cross_layers, with)?,
                deep,
                output: Linear::new(inputs + deepest, 1, with)?,
            },
        };
        Ok(Self { users, items, responses, knowledge, head, parameters })
    }

    /// Returns `[rows]` logits.
    pub(super) fn forward(&self, batch: &Batch, dropout: &mut Dropout<'_>) -> Result<Tensor> {
        let item = self.items.forward(&batch.item)?;
        let seen = self.items.forward(&batch.history)? + self.responses.forward(&batch.responses)?;
        let interest = match &self.head {
            Head::Din { attention, .. } => attention.forward(&seen?, &item, &batch.present)?,
            Head::DcnV2 { .. } => mean(&seen?, &batch.present)?,
        };
        let mut features = vec![self.users.forward(&batch.user)?, item, interest];
        let indices = [&batch.user_index, &batch.item_index];
        for (field, indices) in self.knowledge.iter().zip(indices) {
            if let Some(field) = field {
                features.push(field.forward(indices, batch.rows)?);
            }
        }
        let features = Tensor::cat(&features, 1)?;
        let logits = match &self.head {
            Head::Din { deep, output, .. } => output.forward(&deep.forward(&features, dropout)?)?,
            Head::DcnV2 { cross, deep, output } => {
                let sides = [cross.forward(&features)?, deep.forward(&features, dropout)?];
                output.forward(&Tensor::cat(&sides, 1)?)?
            }
        };
        logits.squeeze(1)
    }
}

/// Returns the sum of `[rows · length, dimension]` vectors, weighted by `[rows, length]`, as `[rows, dimension]`.
fn weighted_sum(vectors: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let (rows, length) = weights.dims2()?;
    let dimension = vectors.dim(1)?;
    let weighted = vectors.broadcast_mul(&weights.reshape((rows * length, 1))?)?;
    weighted.reshape((rows, length, dimension))?.sum(1)
}

/// Returns the mean of the vectors that are present, zeros if there are none.
fn mean(vectors: &Tensor, present: &Tensor) -> Result<Tensor> {
    let count = present.sum_keepdim(1)?.clamp(1f32, f32::MAX)?;
    weighted_sum(vectors, &present.broadcast_div(&count)?)
}

/// DIN's activation unit (Zhou et al. 2018, section 4.3): a weight per item of the history, computed from the item, the
/// target and their product. Weights are not normalised, so their sum shows the strength of an interest.
///
/// The paper's input also has the difference, which is linear in the other inputs. ReLU replaces its Dice.
#[derive(Debug)]
struct Attention {
    of_seen: Linear,
    of_target: Linear,
    of_product: Linear,
    output: Linear,
}

impl Attention {
    fn new(dimension: usize, parameters: &mut Parameters) -> Result<Self> {
        let mut linear = || Linear::new(dimension, ATTENTION, parameters);
        Ok(Self {
            of_seen: linear()?,
            of_target: linear()?,
            of_product: linear()?,
            output: Linear::new(ATTENTION, 1, parameters)?,
        })
    }

    /// Maps `[rows · length, dimension]` seen and `[rows, dimension]` target to `[rows, dimension]`.
    fn forward(&self, seen: &Tensor, target: &Tensor, present: &Tensor) -> Result<Tensor> {
        let (rows, length) = present.dims2()?;
        let dimension = target.dim(1)?;
        let product = seen
            .reshape((rows, length, dimension))?
            .broadcast_mul(&target.unsqueeze(1)?)?
            .reshape((rows * length, dimension))?;
        let pairs = (self.of_seen.forward(seen)? + self.of_product.forward(&product)?)?;
        let hidden = pairs
            .reshape((rows, length, ATTENTION))?
            .broadcast_add(&self.of_target.forward(target)?.unsqueeze(1)?)?
            .relu()?
            .reshape((rows * length, ATTENTION))?;
        let weights = self.output.forward(&hidden)?.reshape((rows, length))?;
        weighted_sum(seen, &(weights * present)?)
    }
}

/// Knowledge of one kind of entity as a field of the features.
#[derive(Debug)]
struct KnowledgeField {
    input: KnowledgeInput,
    /// Number of values that it adds.
    width: usize,
}

#[derive(Debug)]
enum KnowledgeInput {
    /// `[entities, dimension]`, and the projection.
    Vectors(Tensor, Linear, Linear),
    /// `[entities, levels]`, and the table of all codebooks.
    Codes(Tensor, Embedding),
}

impl KnowledgeField {
    fn new(feature: &Feature, entities: usize, dimension: usize, parameters: &mut Parameters) -> Result<Self> {
        let cpu = &Device::Cpu;
        Ok(match feature {
            Feature::Vectors(vectors) => {
                let shape = (entities, vectors.dimension);
                let table = Tensor::from_slice(&vectors.values, shape, cpu)?;
                let first = Linear::new(vectors.dimension, 2 * dimension, parameters)?;
                let second = Linear::new(2 * dimension, dimension, parameters)?;
                Self { input: KnowledgeInput::Vectors(table, first, second), width: dimension }
            }
            Feature::Codes(codes) => {
                let table = Tensor::from_slice(&codes.tokens, (entities, codes.levels), cpu)?;
                let embedding = Embedding::new(codes.vocabulary, dimension, parameters)?;
                Self { input: KnowledgeInput::Codes(table, embedding), width: codes.levels * dimension }
            }
        })
    }

    /// Maps `[rows]` indices to `[rows, width]`.
    fn forward(&self, indices: &Tensor, rows: usize) -> Result<Tensor> {
        match &self.input {
            KnowledgeInput::Vectors(table, first, second) => {
                let vectors = table.index_select(indices, 0)?;
                second.forward(&first.forward(&vectors)?.relu()?)
            }
            KnowledgeInput::Codes(table, embedding) => {
                let tokens = table.index_select(indices, 0)?.flatten_all()?;
                embedding.forward(&tokens)?.reshape((rows, self.width))
            }
        }
    }
}
