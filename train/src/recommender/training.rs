//! A recommender's training, from histories to its folder.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use laser_schema::{DeviceOption, Digest, Progress};

use crate::batch::{Batch, seed_at, steps};
use crate::checkpoint::write_whole;
use crate::course::{Course, Plan, Trained, open_device, remove_checkpoint, run};
use crate::epoch::Stretch;
use crate::layer::Shape;
use crate::lesson::Lesson;
use crate::network::Network;
use crate::output::{self, Tokens, WEIGHTS};
use crate::recommender::belongs::{BELONGS, RecommenderBelongs};
use crate::recommender::catalogue::{Catalogue, positions};
use crate::recommender::history::{History, lessons};
use crate::recommender::objective::{Hits, Objective};
use crate::recommender::options::RecommenderOptions;
use crate::recommender::report::RecommenderEpoch;
use crate::recommender::target;
use crate::recommender::vocabulary::{END, START};

/// Histories that are sorted by length at a time. With this many, padding is 1 to 2 % of a step's tokens on Amazon
/// Beauty; with the 256 of texts it was 20 to 40 %, since histories are short and a step takes hundreds.
const WINDOW: usize = 8192;

/// A recommender that is to be trained.
#[derive(Debug)]
pub struct RecommenderJob<'a> {
    /// How.
    pub options: &'a RecommenderOptions,
    /// Where it is written to.
    pub folder: &'a Path,
    /// The items.
    pub catalogue: &'a Catalogue,
    /// The histories to learn from.
    pub learned: &'a [History],
    /// The histories to measure on.
    pub held_out: &'a [History],
    /// The target, if the recommender is to draft for one.
    pub target: Option<RecommenderTarget<'a>>,
    /// Where it is trained.
    pub device: DeviceOption,
}

/// A recommender that another one drafts for.
#[derive(Debug, Clone, Copy)]
pub struct RecommenderTarget<'a> {
    /// Its folder: a Llama model that knows the same codes.
    pub folder: &'a Path,
    /// The digest of its weights.
    pub digest: &'a str,
}

impl RecommenderJob<'_> {
    fn check(&self) -> Result<()> {
        self.options.validate()?;
        ensure!(
            !self.learned.is_empty() && !self.held_out.is_empty(),
            "{} histories to learn from and {} to measure on: expected at least one of each",
            self.learned.len(),
            self.held_out.len()
        );
        ensure!(
            self.options.loss.has_target() == self.target.is_some(),
            "loss = {:?} {}",
            self.options.loss,
            if self.target.is_some() { "has no target; choose another loss" } else { "needs a target" }
        );
        Ok(())
    }

    fn belongs(&self) -> RecommenderBelongs {
        let identifiers = self.catalogue.digest().to_string();
        let sequences = Digest::of_json(&[self.learned, self.held_out]).to_string();
        let target = self.target.map(|target| target.digest.to_owned());
        let training = Digest::of_json(&(self.options, &identifiers, &sequences, &target)).to_string();
        RecommenderBelongs {
            levels: self.catalogue.vocabulary().sizes(),
            max_items: self.options.max_items,
            constrained: self.options.constrained,
            identifiers,
            sequences,
            target,
            training,
            kept: RecommenderEpoch::default(),
        }
    }

    /// The recommender, if an earlier call has finished it.
    fn finished(&self, training: &str) -> Result<Option<Trained<RecommenderEpoch>>> {
        let Some((belongs, history)) = output::finished::<RecommenderBelongs, _>(self.folder, BELONGS)? else {
            return Ok(None);
        };
        ensure!(
            belongs.training == training,
            "{}: holds a recommender of another training (other histories, identifiers, target or options); give \
             another folder, or remove this one",
            self.folder.display()
        );
        Ok(Some(Trained { folder: self.folder.to_owned(), kept: belongs.kept, history, is_new: false }))
    }

    fn shape(&self) -> Shape {
        let o = self.options;
        Shape::llama([o.hidden_size, o.intermediate_size], o.layers, [o.heads, o.kv_heads])
    }

    /// The most positions that a prompt and its answer take.
    fn positions(&self) -> usize {
        positions(self.options.max_items + 1, self.catalogue.vocabulary().depth())
    }

    /// Writes the folder; the weights come last, and without them there is no model.
    fn write(
        &self,
        belongs: &RecommenderBelongs,
        history: &[RecommenderEpoch],
        weights: &[(String, Tensor)],
    ) -> Result<()> {
        for (name, json) in self.catalogue.vocabulary().files() {
            write_whole(&self.folder.join(name), &serde_json::to_vec_pretty(&json)?)?;
        }
        let tokens = Tokens {
            vocab_size: self.catalogue.vocabulary().size(),
            max_positions: self.positions(),
            end_of_text: &[END],
            bos: Some(START),
        };
        let mut config = output::llama(&self.shape(), tokens, true);
        config[BELONGS] = serde_json::to_value(belongs)?;
        output::write(self.folder, &config, history, (WEIGHTS, weights))
    }
}

/// Trains a recommender: a Llama model that writes the codes of the item that comes next in a history. Takes a stopped
/// training up again, and finds one that is finished. None if `is_stopped` said so before the end: a checkpoint is
/// there then.
///
/// # Errors
/// Options that make no sense, items without an identifier, a folder that cannot be written to or holds another
/// training's model or checkpoint, a target that is not a Llama model of the same codes, and a loss that is not finite.
pub fn train_recommender(
    job: &RecommenderJob<'_>,
    progress: &mut dyn Progress,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<Trained<RecommenderEpoch>>> {
    job.check()?;
    let mut belongs = job.belongs();
    if let Some(trained) = job.finished(&belongs.training)? {
        return Ok(Some(trained));
    }
    let mut learner = Learner::open(job)?;
    let plan = Plan {
        folder: job.folder,
        identity: belongs.training.clone(),
        section: "",
        epochs: job.options.epochs,
        patience: job.options.patience,
        learning_rate: job.options.learning_rate,
        warm_up: job.options.warm_up,
        weight_decay: job.options.weight_decay,
    };
    let Some(outcome) = run(&plan, &mut learner, progress, is_stopped)? else {
        return Ok(None);
    };
    belongs.kept = outcome.kept.clone();
    job.write(&belongs, &outcome.history, &outcome.weights)?;
    remove_checkpoint(job.folder)?;
    let (kept, history) = (outcome.kept, outcome.history);
    Ok(Some(Trained { folder: job.folder.to_owned(), kept, history, is_new: true }))
}

/// A recommender that learns.
struct Learner<'a> {
    options: &'a RecommenderOptions,
    learned: Vec<Lesson>,
    held_out: Vec<Lesson>,
    objective: Objective,
    network: Network,
    target: Option<Network>,
    device: Device,
}

impl<'a> Learner<'a> {
    /// With initial weights.
    fn open(job: &RecommenderJob<'a>) -> Result<Self> {
        let (options, vocabulary) = (job.options, job.catalogue.vocabulary());
        let device = open_device(job.device)?;
        let lessons = |histories, what: &'static str| {
            lessons(histories, job.catalogue, options.max_items).with_context(|| format!("histories to {what}"))
        };
        let open_target =
            |target: RecommenderTarget<'_>| target::open(target.folder, vocabulary, job.positions(), &device);
        Ok(Self {
            options,
            learned: lessons(job.learned, "learn from")?,
            held_out: lessons(job.held_out, "measure on")?,
            objective: Objective {
                loss: options.loss,
                constrained: options.constrained,
                levels: (0..vocabulary.depth()).map(|level| vocabulary.level(level)).collect(),
            },
            network: Network::model(job.shape(), (vocabulary.size(), true), options.seed, &device)?,
            target: job.target.map(open_target).transpose()?,
            device,
        })
    }

    fn batch(&self, lessons: &[Lesson], step: &[usize]) -> Result<Batch> {
        let lessons: Vec<&Lesson> = step.iter().map(|&index| &lessons[index]).collect();
        Ok(Batch::new(&lessons, &self.device)?)
    }

    /// The target's logits at the places of a batch, if there is a target.
    fn target(&self, batch: &Batch) -> Result<Option<Tensor>> {
        self.target.as_ref().map(|target| Ok(logits(target, batch)?.detach())).transpose()
    }

    fn steps(&self, lessons: &[Lesson], epoch: usize) -> Vec<Vec<usize>> {
        let lessons: Vec<&Lesson> = lessons.iter().collect();
        steps(&lessons, (self.options.batch_tokens, WINDOW), self.options.seed, epoch)
    }
}

fn logits(network: &Network, batch: &Batch) -> Result<Tensor> {
    let pass = network.forward(batch, 1)?.pop();
    Ok(pass.context("a model has one pass")?.logits)
}

impl Course for Learner<'_> {
    type Report = RecommenderEpoch;

    fn network(&self) -> &Network {
        &self.network
    }

    fn steps(&self, epoch: usize) -> Vec<Vec<usize>> {
        self.steps(&self.learned, epoch)
    }

    fn loss(&mut self, step: &[usize], _: usize, steps: u32) -> Result<(Tensor, usize)> {
        let batch = self.batch(&self.learned, step)?;
        let target = self.target(&batch)?;
        let batch = batch.with_dropout(self.options.dropout, seed_at(self.options.seed, u64::from(steps)));
        let loss = self.objective.of(&logits(&self.network, &batch)?, &batch.labels.text, target.as_ref())?;
        Ok((loss, batch.before.dim(0)?))
    }

    fn measure(&mut self, epoch: Stretch) -> Result<RecommenderEpoch> {
        let (mut loss, mut places, mut sums) = (0.0, 0.0, Hits::default());
        for step in self.steps(&self.held_out, 0) {
            let batch = self.batch(&self.held_out, &step)?;
            let (text, target) = (&batch.labels.text, self.target(&batch)?);
            let logits = logits(&self.network, &batch)?.detach();
            let count = batch.before.dim(0)? as f64;
            let mean = self.objective.of(&logits, text, target.as_ref())?;
            loss += count * f64::from(mean.to_scalar::<f32>()?);
            places += count;
            let hits = self.objective.hits(&logits, text, target.as_ref())?;
            sums = Hits {
                items: sums.items + hits.items,
                first: sums.first + hits.first,
                all: sums.all + hits.all,
                overlap: sums.overlap + hits.overlap,
            };
        }
        Ok(RecommenderEpoch {
            epoch: epoch.epoch,
            loss: epoch.loss,
            held_out_loss: loss / places,
            first: sums.first / sums.items,
            all: sums.all / sums.items,
            overlap: self.target.is_some().then_some(sums.overlap / places),
            seconds: epoch.seconds,
        })
    }
}
