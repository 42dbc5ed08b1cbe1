//! The two networks over the same features.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::data::Data;
use super::fields::Field;
use super::knowledge::{Feature, Variant};
use super::layers::{Cross, Deep, Dropout, Embedding, Linear, Parameters, weighted_sum};
use super::{ModelKind, TrainingConfig};

/// The hidden width of DIN's activation unit, as in its paper.
const ATTENTION: usize = 36;

/// The features of some impressions.
#[derive(Debug)]
pub(super) struct Batch {
    /// `[rows]` tokens.
    user: Tensor,
    /// `[rows]` tokens.
    item: Tensor,
    /// `[rows]` indices, for features.
    user_index: Tensor,
    /// `[rows]` indices, for features.
    item_index: Tensor,
    /// `[rows · history]` tokens.
    history: Tensor,
    /// `[rows · history]` indices, for features.
    history_index: Tensor,
    /// `[rows · history]`: whether the user liked it, as 0 or 1.
    responses: Tensor,
    /// `[rows, history]`: 1 if there is an item.
    present: Tensor,
    /// `[rows]`: 0 or 1.
    pub(super) labels: Tensor,
}

impl Batch {
    /// Gathers the impressions at these positions; in training ids are taken for unknown now and then.
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
            for (tokens, share) in [(&mut users, config.id_dropout), (&mut items, config.item_dropout())] {
                tokens.iter_mut().filter(|_| rng.gen_bool(share)).for_each(|token| *token = 0);
            }
        }
        let mut history = vec![0; rows * length];
        let mut history_index = vec![0; rows * length];
        let mut responses = vec![0; rows * length];
        let mut present = vec![0f32; rows * length];
        for (row, &position) in positions.iter().enumerate() {
            for (place, seen) in (row * length..).zip(data.history(position, length)) {
                history[place] = data.item_token(seen.item);
                history_index[place] = seen.item;
                responses[place] = u32::from(seen.label);
                present[place] = 1.0;
            }
        }
        let labels: Vec<f32> = impressions().map(|i| f32::from(u8::from(i.label))).collect();
        let cpu = &Device::Cpu;
        Ok(Self {
            user: Tensor::new(users, cpu)?,
            item: Tensor::new(items, cpu)?,
            user_index: Tensor::new(impressions().map(|i| i.user).collect::<Vec<_>>(), cpu)?,
            item_index: Tensor::new(impressions().map(|i| i.item).collect::<Vec<_>>(), cpu)?,
            history: Tensor::new(history, cpu)?,
            history_index: Tensor::new(history_index, cpu)?,
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
    user_fields: Vec<Field>,
    item_fields: Vec<Field>,
    content_in_history: bool,
    head: Head,
    pub(super) parameters: Parameters,
}

/// Makes a logit of the features.
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
        let mut fields = |features: &[Arc<Feature>], entities: usize| {
            let of = |feature: &Arc<Feature>| Field::new(feature, entities, dimension, with);
            features.iter().map(of).collect::<Result<Vec<_>>>()
        };
        let [of_users, of_items] = &variant.features;
        let user_fields = fields(of_users, data.users())?;
        let item_fields = fields(of_items, data.items())?;
        let of_fields: usize = user_fields.iter().chain(&item_fields).map(Field::width).sum();
        let pools = if config.content_in_history && kind == ModelKind::DcnV2 { 2 } else { 1 };
        let inputs = (2 + pools) * dimension + of_fields;
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
        let content_in_history = config.content_in_history;
        Ok(Self { users, items, responses, user_fields, item_fields, content_in_history, head, parameters })
    }

    /// Returns `[rows]` logits.
    pub(super) fn forward(&self, batch: &Batch, dropout: &mut Dropout<'_>) -> Result<Tensor> {
        let (mut item, mut seen) = (self.items.forward(&batch.item)?, self.items.forward(&batch.history)?);
        let of_items = self.of_all_items()?;
        if let Some(content) = self.content(&of_items)? {
            item = (item + content.index_select(&batch.item_index, 0)?)?;
            seen = (seen + content.index_select(&batch.history_index, 0)?)?;
        }
        let seen = (seen + self.responses.forward(&batch.responses)?)?;
        let interest = match &self.head {
            Head::Din { attention, .. } => attention.forward(&seen, &item, &batch.present)?,
            Head::DcnV2 { .. } if self.content_in_history => {
                let liked =
                    (&batch.present * &batch.responses.to_dtype(DType::F32)?.reshape(batch.present.shape())?)?;
                let others = (&batch.present - &liked)?;
                Tensor::cat(&[mean(&seen, &liked)?, mean(&seen, &others)?], 1)?
            }
            Head::DcnV2 { .. } => mean(&seen, &batch.present)?,
        };
        let mut features = vec![self.users.forward(&batch.user)?, item, interest];
        for field in &self.user_fields {
            features.push(field.forward(&batch.user_index)?);
        }
        for (place, field) in self.item_fields.iter().enumerate() {
            features.push(match of_items.get(place) {
                Some(all) => all.index_select(&batch.item_index, 0)?,
                None => field.forward(&batch.item_index)?,
            });
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

    /// By feature `[items, width]`, where items carry their features in histories: a batch has far more places in
    /// histories than there are items.
    fn of_all_items(&self) -> Result<Vec<Tensor>> {
        let fields = self.item_fields.iter().filter(|_| self.content_in_history);
        fields.map(Field::all).collect()
    }

    /// `[items, dimension]`: the sum of each item's features.
    fn content(&self, of_items: &[Tensor]) -> Result<Option<Tensor>> {
        let mut sum: Option<Tensor> = None;
        for (field, all) in self.item_fields.iter().zip(of_items) {
            let own = field.content(all)?;
            sum = Some(match sum {
                Some(sum) => (sum + own)?,
                None => own,
            });
        }
        Ok(sum)
    }
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
