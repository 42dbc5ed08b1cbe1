//! A training from its first step to the draft model's folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor, Var};
use laser_engine::{Engine, TargetParts};
use laser_schema::{DeviceOption, Digest, Progress};

use crate::adam::Adam;
use crate::batch::{Batch, steps};
use crate::checkpoint::{Checkpoint, State};
use crate::config::{DraftKind, Loss, TrainConfig};
use crate::epoch::{EpochReport, PASS_WEIGHT};
use crate::lesson::{Example, Lesson, features};
use crate::loss::{Foresight, smooth_l1};
use crate::network::{Network, Pass};
use crate::output::{self, Belongs, Target};
use crate::verdicts::{Verdicts, best_scale, log_loss};

/// The file in the output's folder that a stopped training is taken up from.
const CHECKPOINT: &str = "checkpoint.safetensors";

/// The time between two checkpoints within an epoch.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(300);

/// Texts by which the log odds are scaled that an acceptance head corrects: some 50,000 proposals for two numbers.
const SCALE_TEXTS: usize = 128;

/// The share of a training over which the learning rate rises.
const WARM_UP: f64 = 0.05;

/// The weight of the token's loss beside that of the features (EAGLE, section 4.2).
const TOKEN_WEIGHT: f64 = 0.1;

/// The weight of a head of Medusa relative to the one before (section 2.2.1).
const HEAD_WEIGHT: f64 = 0.8;

/// Depths that an epoch's report tells.
const MEASURED_PASSES: usize = 3;

/// The noise on the target's features lies between - and + this (EAGLE, section 4.2).
const NOISE: f64 = 0.1;

/// A draft model that is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Its folder.
    pub folder: PathBuf,
    /// The epoch that was kept.
    pub kept: EpochReport,
    /// All epochs.
    pub history: Vec<EpochReport>,
    /// Whether this call finished it.
    pub is_new: bool,
}

/// What is trained, for whom, and from what.
#[derive(Debug)]
pub struct Job<'a> {
    /// The `[train]` section.
    pub config: &'a TrainConfig,
    /// The target.
    pub target: Target,
    /// The texts to learn from.
    pub learned: Vec<Example>,
    /// The texts to measure on.
    pub held_out: Vec<Example>,
    /// Where the draft model is trained.
    pub device: DeviceOption,
    /// The target's vocabulary, for a layer that shares it.
    pub parts: Option<TargetParts>,
    /// The digest of the draft model that an acceptance head is for.
    pub draft: Option<String>,
}

/// What the target says of a job's texts.
pub struct Lessons<'a> {
    /// Of those to learn from.
    pub learned: &'a [Lesson],
    /// Of those to measure on.
    pub held_out: &'a [Lesson],
    /// What keeps the features that are worked on: the target, or for an acceptance head the draft model.
    pub engine: Option<&'a mut dyn Engine>,
}

impl Job<'_> {
    fn folder(&self) -> &Path {
        Path::new(&self.config.output)
    }

    /// What the training is a function of: all but where it is written to.
    fn identity(&self) -> String {
        let config = TrainConfig { output: String::new(), draft: String::new(), ..self.config.clone() };
        let tokens = |examples: &[Example]| {
            let parts = examples.iter().flat_map(|example| [&example.prompt, &example.text]);
            Digest::of_parts(parts.map(|tokens| bytemuck::cast_slice(tokens)))
        };
        let texts = [&self.learned, &self.held_out].map(|examples| tokens(examples));
        Digest::of_json(&(config, &self.target.digest, &self.draft, texts)).to_string()
    }

    /// The draft model, if an earlier call has finished it.
    ///
    /// # Errors
    /// If the folder holds another one.
    pub fn finished(&self) -> Result<Option<Trained>> {
        let Some((belongs, history)) = output::finished(self.folder())? else {
            return Ok(None);
        };
        ensure!(
            belongs.training == self.identity(),
            "[train] output = {:?}: holds a draft model of another training (other texts, target or options); give \
             another folder, or remove this one",
            self.config.output
        );
        Ok(Some(Trained { folder: self.folder().to_owned(), kept: belongs.kept, history, is_new: false }))
    }
}

impl std::fmt::Debug for Lessons<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Lessons");
        f.field("learned", &self.learned.len()).field("held_out", &self.held_out.len()).finish_non_exhaustive()
    }
}

/// Trains the draft model on what the target says of the job's texts; takes a stopped training up again. None if
/// `is_stopped` said so before the end: a checkpoint is there then.
///
/// # Errors
/// A folder that cannot be written to or holds another training's checkpoint, tensor operations that fail, and a loss
/// that is not finite.
pub fn train(
    job: &Job<'_>,
    lessons: Lessons<'_>,
    progress: &mut dyn Progress,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<Trained>> {
    // What works on the target's features has nothing to say of a text's first token.
    let least = if job.config.kind.reads_features() { 2 } else { 1 };
    let [learned, held_out] = [lessons.learned, lessons.held_out]
        .map(|lessons| lessons.iter().filter(|lesson| lesson.places() >= least).collect::<Vec<_>>());
    ensure!(
        !learned.is_empty() && !held_out.is_empty(),
        "{} texts to learn from and {} to measure on: too few; a training needs more published texts, or a larger \
         [train] held_out",
        learned.len(),
        held_out.len()
    );
    let folder = job.folder();
    fs::create_dir_all(folder).with_context(|| format!("[train] output = {:?}", job.config.output))?;
    let mut training = Training::open(job, &learned, lessons.engine)?;
    while training.state.history.len() < job.config.epochs {
        if !training.epoch(&learned, progress, is_stopped)? {
            training.save()?;
            return Ok(None);
        }
        training.measure(&held_out, progress)?;
        training.save()?;
    }
    training.publish().map(Some)
}

/// A training at work.
struct Training<'a, 't> {
    job: &'a Job<'a>,
    engine: Option<&'t mut dyn Engine>,
    device: Device,
    network: Network,
    adam: Adam,
    state: State,
    /// Of an acceptance head: the draft model's sharpness, and scale and shift of the log odds that it corrects.
    sharpness: f32,
    scale: [f64; 2],
    /// The weights of the best epoch.
    best: Vec<Tensor>,
}

/// What a model is worth on held-out texts, as means over their places.
#[derive(Debug, Default)]
struct HeldOut {
    loss: f64,
    /// What is foreseen, by depth.
    depths: Vec<Foresight>,
    /// See [`EpochReport::own_loss`].
    own_loss: Option<f64>,
}

/// The names of the tensors of a checkpoint: of the weights, their moments, and the best epoch's weights.
const PREFIXES: [&str; 4] = ["weight", "mean", "square", "best"];

impl<'a, 't> Training<'a, 't> {
    /// At its beginning, or where its checkpoint left it.
    fn open(job: &'a Job<'a>, learned: &[&Lesson], mut engine: Option<&'t mut dyn Engine>) -> Result<Self> {
        let device = match job.device {
            DeviceOption::Cpu => Device::Cpu,
            DeviceOption::Cuda(index) => Device::new_cuda(index).context("[model] device")?,
        };
        let (mut sharpness, mut scale) = (1.0, [1.0, 0.0]);
        let network = match (job.config.kind, &job.parts) {
            (DraftKind::Model, _) => Network::model(job.config, job.target.vocab_size, &device)?,
            (DraftKind::Acceptance, _) => {
                let draft = engine.as_deref_mut().context("an acceptance head needs its draft model")?;
                let texts = &learned[..learned.len().min(SCALE_TEXTS)];
                let mut verdicts = Verdicts::unsharpened();
                texts.iter().try_for_each(|lesson| verdicts.add(draft, lesson))?;
                sharpness = verdicts.best_sharpness();
                verdicts = Verdicts::at(sharpness);
                texts.iter().try_for_each(|lesson| verdicts.add(draft, lesson))?;
                scale = best_scale(&verdicts.pairs().collect::<Vec<_>>());
                Network::acceptance(job.config, draft.info().hidden_size, &device)?
            }
            (kind, parts) => {
                let parts = parts.as_ref().context("what shares the target's vocabulary needs it")?;
                let new = if kind == DraftKind::Eagle { Network::eagle } else { Network::medusa };
                new(job.config, parts, &device)?
            }
        };
        let weights: Vec<&Var> = network.weights().into_iter().map(|(_, var)| var).collect();
        let adam = Adam::new(&weights, job.config.weight_decay)?;
        let best = copies(&weights)?;
        let state = State { identity: job.identity(), ..State::default() };
        let mut training = Self { job, engine, device, network, adam, state, sharpness, scale, best };
        training.resume()?;
        Ok(training)
    }

    /// Goes on from the checkpoint, if there is one.
    fn resume(&mut self) -> Result<()> {
        let file = self.job.folder().join(CHECKPOINT);
        let Some(checkpoint) = Checkpoint::read(&file, &self.device)? else {
            return Ok(());
        };
        ensure!(
            checkpoint.state.identity == self.state.identity,
            "{}: of a training with other texts, target or options; give another [train] output, or remove it",
            file.display()
        );
        for (at, (name, weight)) in self.network.weights().into_iter().enumerate() {
            let [value, mean, square, best] =
                PREFIXES.map(|prefix| checkpoint.tensor(&format!("{prefix}.{name}"), weight));
            weight.set(&value?)?;
            self.adam.moments[at] = [mean?, square?];
            self.best[at] = best?;
        }
        self.adam.steps = checkpoint.state.updates;
        self.state = checkpoint.state;
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        self.state.updates = self.adam.steps;
        let mut tensors = Vec::new();
        for (((name, weight), [mean, square]), best) in self.weights().zip(&self.adam.moments).zip(&self.best) {
            for (prefix, tensor) in PREFIXES.iter().zip([weight.as_tensor(), mean, square, best]) {
                tensors.push((format!("{prefix}.{name}"), tensor.clone()));
            }
        }
        Checkpoint { state: self.state.clone(), tensors }.write(&self.job.folder().join(CHECKPOINT))
    }

    fn weights(&self) -> impl Iterator<Item = (String, &Var)> {
        self.network.weights().into_iter()
    }

    /// Makes the rest of the epoch's steps; false if it was stopped before their end.
    fn epoch(
        &mut self,
        lessons: &[&Lesson],
        progress: &mut dyn Progress,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let config = self.job.config;
        let epoch = self.state.history.len() + 1;
        let steps = steps(lessons, config.batch_tokens, config.seed, epoch);
        let loss = if self.loss() == Loss::Overlap && epoch == 1 { Loss::Kl } else { self.loss() };
        let (mut since, mut saved) = (Instant::now(), Instant::now());
        progress.stage(&format!("epoch {epoch} of {}", config.epochs));
        for (at, step) in steps.iter().enumerate().skip(self.state.step) {
            if is_stopped() {
                return Ok(false);
            }
            let lessons: Vec<&Lesson> = step.iter().map(|&index| lessons[index]).collect();
            let done = (epoch as f64 - 1.0 + at as f64 / steps.len() as f64) / config.epochs as f64;
            let mean = self.step(&lessons, loss, config.learning_rate * schedule(done))?;
            let places: usize = lessons.iter().map(|lesson| lesson.places()).sum();
            self.state.loss_sum += mean * places as f64;
            self.state.places += places;
            self.state.step = at + 1;
            self.state.seconds += since.elapsed().as_secs_f64();
            since = Instant::now();
            progress.update(self.state.step as u64, Some(steps.len() as u64), &format!("steps, loss {mean:.3}"));
            if saved.elapsed() > CHECKPOINT_EVERY {
                self.save()?;
                saved = Instant::now();
            }
        }
        Ok(true)
    }

    /// One step; returns the mean loss over its places.
    fn step(&mut self, lessons: &[&Lesson], loss: Loss, learning_rate: f64) -> Result<f64> {
        let config = self.job.config;
        let batch = match config.kind {
            DraftKind::Eagle => self.batch(lessons)?.0.with_noise(NOISE, self.noise_seed())?,
            DraftKind::Model | DraftKind::Medusa | DraftKind::Acceptance => self.batch(lessons)?.0,
        };
        let loss = total(&self.network.forward(&batch, config.passes)?, &batch, (config.kind, loss))?;
        let mean = f64::from(loss.to_scalar::<f32>()?);
        ensure!(
            mean.is_finite(),
            "the loss is not finite after {} steps; lower [train] learning_rate",
            self.adam.steps
        );
        let weights: Vec<&Var> = self.network.weights().into_iter().map(|(_, var)| var).collect();
        self.adam.step(&weights, &loss.backward()?, learning_rate)?;
        Ok(mean)
    }

    /// Another one for every step.
    fn noise_seed(&self) -> u64 {
        self.job.config.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(self.adam.steps.unsigned_abs()))
    }

    /// What is minimised after the first epoch. Of an acceptance head there are but two outcomes, and which it was.
    fn loss(&self) -> Loss {
        if self.job.config.kind == DraftKind::Acceptance { Loss::CrossEntropy } else { self.job.config.loss }
    }

    /// The lessons as tensors, with the features that are worked on; for an acceptance head also the proposals.
    fn batch(&mut self, lessons: &[&Lesson]) -> Result<(Batch, Verdicts)> {
        let mut verdicts = Verdicts::at(self.sharpness);
        if self.job.config.kind == DraftKind::Model {
            return Ok((Batch::new(lessons, &self.device)?, verdicts));
        }
        let engine = self.engine.as_deref_mut().context("what reads features needs what makes them")?;
        let batch = if self.job.config.kind == DraftKind::Acceptance {
            lessons.iter().try_for_each(|lesson| verdicts.add(engine, lesson))?;
            Batch::of_verdicts(&verdicts, self.scale, &self.device)?
        } else {
            let told = lessons.iter().map(|lesson| features(engine, lesson)).collect::<Result<Vec<_>, _>>()?;
            Batch::with_features(lessons, &told, engine.info().hidden_size, &self.device)?
        };
        Ok((batch, verdicts))
    }

    /// What the model is worth on held-out texts.
    fn held_out(&mut self, lessons: &[&Lesson]) -> Result<HeldOut> {
        let config = self.job.config;
        let (mut places, mut held_out, mut proposals) = (0.0, HeldOut::default(), Vec::new());
        for step in steps(lessons, config.batch_tokens, config.seed, 0) {
            let lessons: Vec<&Lesson> = step.iter().map(|&index| lessons[index]).collect();
            let (batch, verdicts) = self.batch(&lessons)?;
            let passes = self.network.forward(&batch, config.passes.max(MEASURED_PASSES))?;
            let count = batch.before.dim(0)? as f64;
            let trained = if config.kind == DraftKind::Eagle { &passes[..config.passes] } else { &passes };
            held_out.loss += count * f64::from(total(trained, &batch, (config.kind, self.loss()))?.to_scalar::<f32>()?);
            places += count;
            held_out.depths.resize_with(passes.len(), Foresight::default);
            for (sum, pass) in held_out.depths.iter_mut().zip(&passes) {
                let found = Foresight::sums(&pass.logits.detach(), &batch.labels)?;
                *sum = Foresight { overlap: sum.overlap + found.overlap, first: sum.first + found.first };
            }
            proposals.extend(verdicts.pairs());
        }
        held_out.loss /= places;
        for sum in &mut held_out.depths {
            *sum = Foresight { overlap: sum.overlap / places, first: sum.first / places };
        }
        held_out.own_loss = (!proposals.is_empty()).then(|| log_loss(&proposals, best_scale(&proposals)));
        Ok(held_out)
    }

    /// Ends the epoch: measures it on held-out texts, and keeps its weights if it is the best.
    fn measure(&mut self, lessons: &[&Lesson], progress: &mut dyn Progress) -> Result<()> {
        let HeldOut { loss: held_out_loss, depths, own_loss } = self.held_out(lessons)?;
        let (at_once, deeper) = depths.split_first().context("no pass was measured")?;
        let State { loss_sum, places, seconds, ref history, .. } = self.state;
        let report = EpochReport {
            epoch: history.len() + 1,
            loss: loss_sum / places as f64,
            held_out_loss,
            overlap: at_once.overlap,
            first: at_once.first,
            deeper: deeper.iter().map(|depth| depth.first).collect(),
            own_loss,
            seconds,
        };
        if history.iter().all(|earlier| earlier.score() < report.score()) {
            self.best = copies(&self.weights().map(|(_, var)| var).collect::<Vec<_>>())?;
        }
        progress.finish_with(&format!(
            "loss {:.3}, held out {:.3}; overlap {:.1} %, first {:.1} %",
            report.loss,
            report.held_out_loss,
            100.0 * report.overlap,
            100.0 * report.first
        ));
        self.state.history.push(report);
        self.state = State { step: 0, loss_sum: 0.0, places: 0, seconds: 0.0, ..self.state.clone() };
        Ok(())
    }

    /// Writes the model's folder; the checkpoint is of no use then.
    fn publish(self) -> Result<Trained> {
        let history = self.state.history.clone();
        // Of equals the first: that is the one whose weights were kept.
        let best = history.iter().reduce(|a, b| if b.score() > a.score() { b } else { a });
        let kept = best.context("[train] epochs: none")?.clone();
        let folder = self.job.folder();
        let belongs = Belongs {
            target: self.job.target.digest.clone(),
            draft: self.job.draft.clone(),
            scale: (self.job.config.kind == DraftKind::Acceptance).then_some(self.scale),
            training: self.state.identity.clone(),
            kept: kept.clone(),
        };
        let weights: Vec<_> = self.weights().zip(&self.best).map(|((name, _), best)| (name, best.clone())).collect();
        let shape = (self.job.config.kind, &self.network.shape);
        output::write(folder, &self.job.target, shape, &weights, (&belongs, &history))?;
        let checkpoint = folder.join(CHECKPOINT);
        fs::remove_file(&checkpoint).with_context(|| checkpoint.display().to_string())?;
        Ok(Trained { folder: folder.to_owned(), kept, history, is_new: true })
    }
}

/// The loss of all passes: of the tokens, and where the model works on features, of these as well.
fn total(passes: &[Pass], batch: &Batch, (kind, loss): (DraftKind, Loss)) -> candle_core::Result<Tensor> {
    let weight = if kind == DraftKind::Medusa { HEAD_WEIGHT } else { PASS_WEIGHT };
    let mut sum: Option<Tensor> = None;
    for (pass, depth) in passes.iter().zip(0..) {
        let of_tokens = loss.of(&pass.logits, &batch.labels)?;
        let of_pass = match (&pass.features, &batch.features) {
            (Some(found), Some(told)) => (smooth_l1(found, &told.expected)? + (of_tokens * TOKEN_WEIGHT)?)?,
            _ => of_tokens,
        };
        let weighted = (of_pass * f64::powi(weight, depth))?;
        sum = Some(match sum {
            Some(sum) => (sum + weighted)?,
            None => weighted,
        });
    }
    sum.map_or_else(|| candle_core::bail!("nothing was computed"), Ok)
}

/// The share of the largest learning rate at this share of the training.
fn schedule(done: f64) -> f64 {
    let fall = (done - WARM_UP) / (1.0 - WARM_UP);
    // The first step is not of rate 0: it would be lost.
    (done / WARM_UP + 0.01).min(0.5 * (1.0 + (std::f64::consts::PI * fall.max(0.0)).cos()))
}

fn copies(weights: &[&Var]) -> Result<Vec<Tensor>> {
    Ok(weights.iter().map(|weight| weight.as_tensor().copy()).collect::<candle_core::Result<_>>()?)
}

#[cfg(test)]
mod acceptance_tests;
#[cfg(test)]
mod eagle_tests;
#[cfg(test)]
mod medusa_tests;
#[cfg(test)]
mod tests;
