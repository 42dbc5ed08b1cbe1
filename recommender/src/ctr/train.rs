//! Training of one model, and of all models of a comparison side by side.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::data::{Data, Part};
use super::knowledge::Variant;
use super::layers::Dropout;
use super::network::{Batch, Network};
use super::{ModelKind, TrainingConfig};
use crate::statistics::{auc, log_loss};

/// Impressions per forward outside of training.
const EVALUATION_BATCH: usize = 4096;

/// Items by how often they are trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemGroup {
    /// As reports name it.
    pub name: &'static str,
    /// Training interactions at least.
    pub least: u32,
    /// Training interactions at most.
    pub most: u32,
}

/// The groups that test impressions are measured by; the last three make up the second.
pub const ITEM_GROUPS: [ItemGroup; 5] = [
    ItemGroup { name: "cold (0)", least: 0, most: 0 },
    ItemGroup { name: "warm", least: 1, most: u32::MAX },
    ItemGroup { name: "1-5", least: 1, most: 5 },
    ItemGroup { name: "6-20", least: 6, most: 20 },
    ItemGroup { name: "more", least: 21, most: u32::MAX },
];

/// A model on the test impressions of one of [`ITEM_GROUPS`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GroupQuality {
    /// The group's name.
    pub group: &'static str,
    /// Its test impressions.
    pub impressions: usize,
    /// Area under the ROC curve, if there are both labels.
    pub auc: Option<f64>,
    /// Log loss in nats, if there are impressions.
    pub log_loss: Option<f64>,
}

/// One trained model, measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// The model.
    pub model: ModelKind,
    /// Index of the variant.
    pub variant: usize,
    /// Decided initial weights, order and dropout, and by item the split.
    pub seed: u64,
    /// Area under the ROC curve on the test part.
    pub auc: f64,
    /// Log loss on the test part, in nats.
    pub log_loss: f64,
    /// The same by the items' training interactions, in the order of [`ITEM_GROUPS`].
    pub groups: Vec<GroupQuality>,
    /// AUC on the validation part of the best epoch.
    pub validation_auc: f64,
    /// The best epoch, from 1.
    pub epoch: usize,
}

/// Trains every model on every variant with every seed, up to `threads` at a time, and reports each when it is done.
/// The result is in the order of models, variants, seeds.
///
/// # Errors
/// A tensor operation that fails, a training that diverges, and threads that cannot be started; of several errors the
/// first in this order.
pub fn evaluate(
    data: &Data,
    models: &[ModelKind],
    variants: &[Variant],
    seeds: &[u64],
    config: &TrainingConfig,
    threads: usize,
    done: &(dyn Fn(&Run) + Sync),
) -> Result<Vec<Run>> {
    let mut jobs = Vec::new();
    for &model in models {
        for variant in 0..variants.len() {
            jobs.extend(seeds.iter().map(|&seed| (model, variant, seed)));
        }
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Vec<Mutex<Option<Result<Run>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let job = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(model, index, seed)) = jobs.get(job) else {
                return;
            };
            let variant = &variants[index];
            let result = train(data, model, variant, seed, config).map(|run| Run { variant: index, ..run });
            let result = result.with_context(|| format!("{}, {}, seed {seed}", model.as_str(), variant.name));
            match &result {
                Ok(run) => done(run),
                Err(_) => failed.store(true, Ordering::Relaxed),
            }
            *results[job].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
        }
    };
    // candle multiplies matrices in rayon's pool: with a pool of its own, a training stays on its thread.
    let pools =
        (0..threads.clamp(1, jobs.len().max(1))).map(|_| rayon::ThreadPoolBuilder::new().num_threads(1).build());
    let pools = pools.collect::<Result<Vec<_>, _>>().context("cannot start a thread for training")?;
    std::thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(|| pool.install(work));
        }
    });
    let results =
        results.into_iter().filter_map(|result| result.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
    results.collect()
}

/// Trains one model.
fn train(data: &Data, model: ModelKind, variant: &Variant, seed: u64, config: &TrainingConfig) -> Result<Run> {
    let network = Network::new(model, data, variant, config, seed)?;
    let mut trainer = Trainer::new(data, network, config, seed)?;
    let mut best: Option<(f64, usize, Vec<Tensor>)> = None;
    for epoch in 1..=config.epochs {
        let loss = trainer.epoch()?;
        let validation = auc_of(&trainer.logits(Part::Validation)?, &data.labels(Part::Validation));
        ensure!(loss.is_finite(), "the loss is not finite in epoch {epoch}; lower [eval.training] learning_rate");
        match &best {
            Some((auc, at, _)) if validation <= *auc => {
                if epoch - at >= config.patience {
                    break;
                }
            }
            _ => {
                best = Some((validation, epoch, trainer.network.parameters.values()?));
            }
        }
    }
    let (validation_auc, epoch, values) = best.unwrap_or_default();
    trainer.network.parameters.restore(&values)?;
    let logits = trainer.logits(Part::Test)?;
    let labels = data.labels(Part::Test);
    let groups = ITEM_GROUPS.map(|group| group_quality(data, group, &logits, &labels)).into();
    let (auc, log_loss) = (auc_of(&logits, &labels), log_loss(&logits, &labels));
    Ok(Run { model, variant: 0, seed, auc, log_loss, groups, validation_auc, epoch })
}

struct Trainer<'a> {
    data: &'a Data,
    config: &'a TrainingConfig,
    network: Network,
    optimiser: AdamW,
    rng: Xoshiro256PlusPlus,
    order: Vec<usize>,
}

impl<'a> Trainer<'a> {
    fn new(data: &'a Data, network: Network, config: &'a TrainingConfig, seed: u64) -> candle_core::Result<Self> {
        let parameters =
            ParamsAdamW { lr: config.learning_rate, weight_decay: config.weight_decay, ..ParamsAdamW::default() };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        // This stream differs from that of the initial weights and is the same for all variants of a seed.
        rng.jump();
        Ok(Self {
            data,
            config,
            optimiser: AdamW::new(network.parameters.vars.clone(), parameters)?,
            network,
            rng,
            order: data.positions(Part::Train).to_vec(),
        })
    }

    /// Makes one pass over the training part and returns the mean log loss.
    fn epoch(&mut self) -> candle_core::Result<f64> {
        self.order.shuffle(&mut self.rng);
        let mut sum = 0.0;
        for positions in self.order.chunks(self.config.batch) {
            let batch = Batch::new(self.data, positions, self.config, Some(&mut self.rng))?;
            let mut dropout = Dropout { training: Some((self.config.dropout, &mut self.rng)) };
            let logits = self.network.forward(&batch, &mut dropout)?;
            let loss = mean_log_loss(&logits, &batch.labels)?;
            self.optimiser.backward_step(&loss)?;
            sum += f64::from(loss.to_scalar::<f32>()?) * positions.len() as f64;
        }
        Ok(sum / self.order.len() as f64)
    }

    /// Logits of a part's impressions, in the order of its positions.
    fn logits(&self, part: Part) -> candle_core::Result<Vec<f32>> {
        let mut logits = Vec::new();
        for positions in self.data.positions(part).chunks(EVALUATION_BATCH) {
            let batch = Batch::new(self.data, positions, self.config, None)?;
            let mut whole = Dropout { training: None };
            let found = self.network.forward(&batch, &mut whole)?;
            logits.extend(found.to_vec1::<f32>()?);
        }
        Ok(logits)
    }
}

/// The AUC of a part: both labels are there, as `Data` has checked.
fn auc_of(logits: &[f32], labels: &[bool]) -> f64 {
    auc(logits, labels).unwrap_or(f64::NAN)
}

fn group_quality(data: &Data, group: ItemGroup, logits: &[f32], labels: &[bool]) -> GroupQuality {
    let counts = data.positions(Part::Test).iter().map(|&position| data.item_count(data.impression(position).item));
    let rows = counts.zip(logits.iter().zip(labels)).filter(|(count, _)| (group.least..=group.most).contains(count));
    let (logits, labels): (Vec<f32>, Vec<bool>) = rows.map(|(_, (logit, label))| (logit, label)).unzip();
    GroupQuality {
        group: group.name,
        impressions: labels.len(),
        auc: auc(&logits, &labels),
        log_loss: (!labels.is_empty()).then(|| log_loss(&logits, &labels)),
    }
}

/// Returns the mean of `max(z, 0) - z y + ln(1 + exp(-|z|))`, which is the log loss without overflow.
fn mean_log_loss(logits: &Tensor, labels: &Tensor) -> candle_core::Result<Tensor> {
    let linear = (logits.relu()? - (logits * labels)?)?;
    let rest = (logits.abs()?.neg()?.exp()? + 1.0)?.log()?;
    (linear + rest)?.mean_all()
}
