//! A draft model's training, from a target's texts to the draft model's folder.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use laser_engine::{Engine, TargetParts};
use laser_schema::{DeviceOption, Digest, Progress};

use crate::batch::{Batch, WINDOW, seed_at, steps};
use crate::config::{DraftKind, Loss, TrainConfig};
use crate::course::{Course, Plan, Trained, open_device, remove_checkpoint, run};
use crate::epoch::{Epoch, OVERLAP, PASS_WEIGHT};
use crate::layer::Shape;
use crate::lesson::{Example, Lesson, features};
use crate::loss::{Foresight, smooth_l1};
use crate::network::{Network, Pass};
use crate::output::{self, BELONGS, Belongs, Target};
use crate::own_tokens::OwnTokens;
use crate::verdicts::{Verdicts, best_scale, log_loss};

/// Texts by which the log odds are scaled that an acceptance head corrects: some 50,000 proposals for two numbers.
const SCALE_TEXTS: usize = 128;

/// Rises whenever the same texts and options would train another draft model, so that no checkpoint of an earlier build
/// is taken up by other rules. 2: over the tokens of the texts alone.
const RULES: u32 = 2;

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
        let target = (&self.target.digest, &self.target.tokenizer);
        Digest::of_json(&(RULES, config, target, &self.draft, texts)).to_string()
    }

    /// The tokens of all texts and prompts, and those that end a text: what the draft model is going to tell of.
    fn tokens(&self) -> OwnTokens {
        let examples = self.learned.iter().chain(&self.held_out);
        let written = examples.flat_map(|example| example.prompt.iter().chain(&example.text));
        OwnTokens::new(written.chain(&self.target.end_of_text).copied())
    }

    /// The draft model, if an earlier call has finished it.
    ///
    /// # Errors
    /// If the folder holds another one.
    pub fn finished(&self) -> Result<Option<Trained>> {
        let Some((belongs, history)) = output::finished::<Belongs>(self.folder(), BELONGS)? else {
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
    let mut drafting = Drafting::open(job, learned, held_out, lessons.engine)?;
    let plan = Plan {
        folder: job.folder(),
        identity: job.identity(),
        section: "[train] ",
        epochs: job.config.epochs,
        patience: usize::MAX,
        learning_rate: job.config.learning_rate,
        warm_up: WARM_UP,
        weight_decay: job.config.weight_decay,
    };
    let Some(outcome) = run(&plan, &mut drafting, progress, is_stopped)? else {
        return Ok(None);
    };
    let belongs = Belongs {
        target: job.target.digest.clone(),
        tokenizer: job.target.tokenizer.clone(),
        draft: job.draft.clone(),
        scale: (job.config.kind == DraftKind::Acceptance).then_some(drafting.scale),
        training: plan.identity,
        kept: outcome.kept.clone(),
    };
    let shape = (job.config.kind, &drafting.network.shape);
    let weights = (&outcome.weights[..], &drafting.own);
    output::write_draft(job.folder(), &job.target, shape, weights, (&belongs, &outcome.history))?;
    remove_checkpoint(job.folder())?;
    let (kept, history) = (outcome.kept, outcome.history);
    Ok(Some(Trained { folder: job.folder().to_owned(), kept, history, is_new: true }))
}

/// A draft model that learns.
struct Drafting<'a, 't> {
    job: &'a Job<'a>,
    learned: Vec<&'a Lesson>,
    held_out: Vec<&'a Lesson>,
    engine: Option<&'t mut dyn Engine>,
    device: Device,
    own: OwnTokens,
    network: Network,
    /// Of an acceptance head: the draft model's sharpness, and scale and shift of the log odds that it corrects.
    sharpness: f32,
    scale: [f64; 2],
}

/// What a model is worth on held-out texts, as means over their places.
#[derive(Debug, Default)]
struct HeldOut {
    loss: f64,
    /// What is foreseen, by depth.
    depths: Vec<Foresight>,
    /// See [`Epoch::own_loss`].
    own_loss: Option<f64>,
}

impl<'a, 't> Drafting<'a, 't> {
    /// With initial weights.
    fn open(
        job: &'a Job<'a>,
        learned: Vec<&'a Lesson>,
        held_out: Vec<&'a Lesson>,
        mut engine: Option<&'t mut dyn Engine>,
    ) -> Result<Self> {
        let (device, own) = (open_device(job.device)?, job.tokens());
        let (mut sharpness, mut scale) = (1.0, [1.0, 0.0]);
        let network = match (job.config.kind, &job.parts) {
            (DraftKind::Model, _) => {
                Network::model(model_shape(job.config), (own.len(), true), job.config.seed, &device)?
            }
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
                new(job.config, (parts, own.tokens()), &device)?
            }
        };
        Ok(Self { job, learned, held_out, engine, device, own, network, sharpness, scale })
    }

    /// What is minimised after the first epoch. Of an acceptance head there are but two outcomes, and which it was.
    fn minimised(&self) -> Loss {
        if self.job.config.kind == DraftKind::Acceptance { Loss::CrossEntropy } else { self.job.config.loss }
    }

    /// The lessons as tensors, with the features that are worked on; for an acceptance head also the proposals.
    fn batch(&mut self, lessons: &[&Lesson]) -> Result<(Batch, Verdicts)> {
        let mut verdicts = Verdicts::at(self.sharpness);
        let numbered = || lessons.iter().map(|lesson| self.own.numbered(lesson)).collect::<Result<Vec<_>>>();
        if self.job.config.kind == DraftKind::Model {
            return Ok((Batch::new(&numbered()?, &self.device)?, verdicts));
        }
        let engine = self.engine.as_deref_mut().context("what reads features needs what makes them")?;
        let batch = if self.job.config.kind == DraftKind::Acceptance {
            lessons.iter().try_for_each(|lesson| verdicts.add(engine, lesson))?;
            Batch::of_verdicts(&verdicts, self.scale, &self.device)?
        } else {
            let told = lessons.iter().map(|lesson| features(engine, lesson)).collect::<Result<Vec<_>, _>>()?;
            Batch::with_features(&numbered()?, &told, engine.info().hidden_size, &self.device)?
        };
        Ok((batch, verdicts))
    }

    /// What the model is worth on held-out texts.
    fn held_out(&mut self) -> Result<HeldOut> {
        let (config, all) = (self.job.config, self.held_out.clone());
        let (mut places, mut held_out, mut proposals) = (0.0, HeldOut::default(), Vec::new());
        for step in steps(&all, (config.batch_tokens, WINDOW), config.seed, 0) {
            let lessons: Vec<&Lesson> = step.iter().map(|&index| all[index]).collect();
            let (batch, verdicts) = self.batch(&lessons)?;
            let passes = self.network.forward(&batch, config.passes.max(MEASURED_PASSES))?;
            let count = batch.before.dim(0)? as f64;
            let trained = if config.kind == DraftKind::Eagle { &passes[..config.passes] } else { &passes };
            held_out.loss +=
                count * f64::from(total(trained, &batch, (config.kind, self.minimised()))?.to_scalar::<f32>()?);
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
}

impl Course for Drafting<'_, '_> {
    fn network(&self) -> &Network {
        &self.network
    }

    fn steps(&self, epoch: usize) -> Vec<Vec<usize>> {
        steps(&self.learned, (self.job.config.batch_tokens, WINDOW), self.job.config.seed, epoch)
    }

    fn loss(&mut self, step: &[usize], epoch: usize, steps: u32) -> Result<(Tensor, usize)> {
        let config = self.job.config;
        let loss = if self.minimised() == Loss::Overlap && epoch == 1 { Loss::Kl } else { self.minimised() };
        let lessons: Vec<&Lesson> = step.iter().map(|&index| self.learned[index]).collect();
        let mut batch = self.batch(&lessons)?.0;
        if config.kind == DraftKind::Eagle {
            batch = batch.with_noise(NOISE, seed_at(config.seed, u64::from(steps)))?;
        }
        let loss = total(&self.network.forward(&batch, config.passes)?, &batch, (config.kind, loss))?;
        Ok((loss, lessons.iter().map(|lesson| lesson.places()).sum()))
    }

    /// The score is the overlap, with the first tokens of each greater depth counting half as much. Of an acceptance
    /// head, whose probabilities are what it is for, it is the likelihood.
    fn measure(&mut self) -> Result<Epoch> {
        let HeldOut { loss: held_out_loss, depths, own_loss } = self.held_out()?;
        let (at_once, deeper) = depths.split_first().context("no pass was measured")?;
        let deep = deeper.iter().zip(1..).map(|(depth, pass)| depth.first * PASS_WEIGHT.powi(pass)).sum::<f64>();
        let score = if own_loss.is_some() { -held_out_loss } else { at_once.overlap + deep };
        let mut shares = vec![(OVERLAP.to_owned(), at_once.overlap), ("first".to_owned(), at_once.first)];
        shares.extend(deeper.iter().zip(2..).map(|(depth, at)| (format!("at depth {at}"), depth.first)));
        Ok(Epoch { held_out_loss, shares, own_loss, score, ..Epoch::default() })
    }
}

/// The shape of a whole draft model.
fn model_shape(config: &TrainConfig) -> Shape {
    Shape::llama([config.hidden_size, config.intermediate_size], config.layers, [config.heads; 2])
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

#[cfg(test)]
mod acceptance_tests;
#[cfg(test)]
mod eagle_tests;
#[cfg(test)]
mod medusa_tests;
#[cfg(test)]
mod tests;
