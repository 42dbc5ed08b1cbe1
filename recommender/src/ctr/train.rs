//! Training of one model, and of all models of a comparison side by side.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

/// The reasons why a model could not be trained.
#[derive(Debug, thiserror::Error)]
pub enum CtrError {
    /// A tensor operation failed.
    #[error("{model}, {variant}, seed {seed}: {source}")]
    Tensor {
        /// The model.
        model: &'static str,
        /// The variant.
        variant: String,
        /// The seed.
        seed: u64,
        /// candle's error.
        source: Box<candle_core::Error>,
    },
    /// Training diverged.
    #[error(
        "{model}, {variant}, seed {seed}: the loss is not finite in epoch {epoch}; lower [eval.training] learning_rate"
    )]
    Diverged {
        /// The model.
        model: &'static str,
        /// The variant.
        variant: String,
        /// The seed.
        seed: u64,
        /// Counted from 1.
        epoch: usize,
    },
    /// No thread could be started.
    #[error("cannot start a thread for training: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// One trained model, measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// The model.
    pub model: ModelKind,
    /// Index of the variant.
    pub variant: usize,
    /// The seed of initial weights, order and dropout.
    pub seed: u64,
    /// Area under the ROC curve on the test part.
    pub auc: f64,
    /// Log loss on the test part, in nats.
    pub log_loss: f64,
    /// AUC on the validation part of the best epoch.
    pub validation_auc: f64,
    /// The best epoch, from 1.
    pub epoch: usize,
}

/// Trains every model on every variant with every seed, up to `threads` at a time, and reports each when it is done.
/// The result is in the order of models, variants, seeds.
///
/// # Errors
/// See [`CtrError`]; of several errors the first in this order.
pub fn evaluate(
    data: &Data,
    models: &[ModelKind],
    variants: &[Variant],
    seeds: &[u64],
    config: &TrainingConfig,
    threads: usize,
    done: &(dyn Fn(&Run) + Sync),
) -> Result<Vec<Run>, CtrError> {
    let mut jobs = Vec::new();
    for &model in models {
        for variant in 0..variants.len() {
            jobs.extend(seeds.iter().map(|&seed| (model, variant, seed)));
        }
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Vec<Mutex<Option<Result<Run, CtrError>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let job = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(model, index, seed)) = jobs.get(job) else {
                return;
            };
            let result = train(data, model, &variants[index], seed, config).map(|run| Run { variant: index, ..run });
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
    let pools = pools.collect::<Result<Vec<_>, _>>()?;
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
fn train(
    data: &Data,
    model: ModelKind,
    variant: &Variant,
    seed: u64,
    config: &TrainingConfig,
) -> Result<Run, CtrError> {
    let failed = |source| CtrError::Tensor {
        model: model.as_str(),
        variant: variant.name.clone(),
        seed,
        source: Box::new(source),
    };
    let network = Network::new(model, data, variant, config, seed).map_err(failed)?;
    let mut trainer = Trainer::new(data, network, config, seed).map_err(failed)?;
    let mut best: Option<(f64, usize, Vec<Tensor>)> = None;
    for epoch in 1..=config.epochs {
        let loss = trainer.epoch().map_err(failed)?;
        let (validation, _) = trainer.measure(Part::Validation).map_err(failed)?;
        if !loss.is_finite() {
            return Err(CtrError::Diverged { model: model.as_str(), variant: variant.name.clone(), seed, epoch });
        }
        match &best {
            Some((auc, at, _)) if validation <= *auc => {
                if epoch - at >= config.patience {
                    break;
                }
            }
            _ => {
                let values = trainer.network.parameters.values().map_err(failed)?;
                best = Some((validation, epoch, values));
            }
        }
    }
    let (validation_auc, epoch, values) = best.unwrap_or_default();
    trainer.network.parameters.restore(&values).map_err(failed)?;
    let (auc, log_loss) = trainer.measure(Part::Test).map_err(failed)?;
    Ok(Run { model, variant: 0, seed, auc, log_loss, validation_auc, epoch })
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

    /// Returns AUC and log loss of a part.
    fn measure(&self, part: Part) -> candle_core::Result<(f64, f64)> {
        let mut logits = Vec::new();
        for positions in self.data.positions(part).chunks(EVALUATION_BATCH) {
            let batch = Batch::new(self.data, positions, self.config, None)?;
            let mut whole = Dropout { training: None };
            let found = self.network.forward(&batch, &mut whole)?;
            logits.extend(found.to_vec1::<f32>()?);
        }
        let labels = self.data.labels(part);
        // Both labels exist: `Data` has checked it.
        let auc = auc(&logits, &labels).unwrap_or(f64::NAN);
        Ok((auc, log_loss(&logits, &labels)))
    }
}

/// Returns the mean of `max(z, 0) - z y + ln(1 + exp(-|z|))`, which is the log loss without overflow.
fn mean_log_loss(logits: &Tensor, labels: &Tensor) -> candle_core::Result<Tensor> {
    let linear = (logits.relu()? - (logits * labels)?)?;
    let rest = (logits.abs()?.neg()?.exp()? + 1.0)?.log()?;
    (linear + rest)?.mean_all()
}
