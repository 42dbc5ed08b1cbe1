//! A recommender that learns, step by step.

use anyhow::{Context as _, Result};
use candle_core::{Device, Tensor};
use laser_schema::Progress;

use crate::atspeed::combined;
use crate::batch::{Batch, seed_at, steps};
use crate::course::{Course, open_device};
use crate::epoch::{Epoch, OVERLAP};
use crate::lesson::Lesson;
use crate::network::Network;
use crate::recommender::alignment::Alignment;
use crate::recommender::catalogue::Catalogue;
use crate::recommender::history::{last_lessons, lessons};
use crate::recommender::job::{RecommenderJob, RecommenderTarget};
use crate::recommender::lists::{Continuations, Drawn, LessonSet};
use crate::recommender::objective::{Hits, ListPlaces, Objective};
use crate::recommender::options::{RecommenderLoss, RecommenderOptions};
use crate::recommender::target;
use crate::softmax::log_probabilities;

/// Histories that are sorted by length at a time. With this many, padding is 1 to 2 % of a step's tokens on Amazon
/// Beauty; with the 256 of texts it was 20 to 40 %, since histories are short and a step takes hundreds.
const WINDOW: usize = 8192;

/// What tells the dropout of listed items from that of histories.
const OF_LISTS: u64 = 1 << 32;

/// A recommender that learns.
pub(crate) struct Learner<'a> {
    options: &'a RecommenderOptions,
    alignment: Option<&'a Alignment>,
    catalogue: &'a Catalogue,
    continuations: Continuations,
    learned: LessonSet,
    held_out: LessonSet,
    objective: Objective,
    network: Network,
    target: Option<Network>,
    device: Device,
}

impl<'a> Learner<'a> {
    /// With initial weights.
    pub(crate) fn open(job: &'a RecommenderJob<'a>, progress: &mut dyn Progress) -> Result<Self> {
        let (options, vocabulary) = (job.options, job.catalogue.vocabulary());
        let (device, lists) = (open_device(job.device)?, job.lists());
        let set = |histories, lists: Option<&[Vec<u32>]>, what: &'static str| {
            let lessons = lessons(histories, job.catalogue, options.max_items);
            let last = || last_lessons(histories, options.max_items);
            lessons
                .and_then(|l| LessonSet::new(l).with_lists(lists.unwrap_or_default(), &last(), job.catalogue))
                .with_context(|| format!("histories to {what}"))
        };
        let open_target =
            |target: RecommenderTarget<'_>| target::open(target.folder, vocabulary, job.positions(), &device);
        let mut learner = Self {
            options,
            alignment: lists.map(|lists| lists.alignment),
            catalogue: job.catalogue,
            continuations: Continuations::new(job.catalogue),
            learned: set(job.learned, lists.map(|lists| lists.learned), "learn from")?,
            held_out: set(job.held_out, lists.map(|lists| lists.held_out), "measure on")?,
            objective: Objective {
                loss: options.loss,
                constrained: options.constrained,
                levels: (0..vocabulary.depth()).map(|level| vocabulary.level(level)).collect(),
            },
            network: Network::model(job.shape(), (vocabulary.size(), true), options.seed, &device)?,
            target: job.target.map(open_target).transpose()?,
            device,
        };
        if lists.is_some() && options.loss == RecommenderLoss::AtSpeedS {
            learner.read_last(progress)?;
        }
        Ok(learner)
    }

    /// Lets the target read the last items of all lists.
    fn read_last(&mut self, progress: &mut dyn Progress) -> Result<()> {
        progress.stage("the target reads the last items of its lists");
        let all = [&self.learned, &self.held_out].map(|set| self.last_of(set));
        for (set, found) in [&mut self.learned, &mut self.held_out].into_iter().zip(all) {
            for (at, log_p_k) in found? {
                if let Some(list) = &mut set.lists[at] {
                    list.log_p_k = log_p_k;
                }
            }
        }
        Ok(())
    }

    /// By lesson with a list, the log probabilities that the target gives the codes of the list's last item, among
    /// those that may follow.
    fn last_of(&self, set: &LessonSet) -> Result<Vec<(usize, Vec<f32>)>> {
        let (owners, lessons) = set.last_listed();
        let mut found = Vec::with_capacity(owners.len());
        for step in self.steps(&lessons, 0) {
            let step_lessons: Vec<Lesson> = step.iter().map(|&index| lessons[index].clone()).collect();
            let batch = Batch::new(&step_lessons, &self.device)?;
            let logits = self.target(&batch)?.context("no target")?;
            let allowed = (logits + self.continuations.mask(&step_lessons, &self.device)?)?;
            let log_p = log_probabilities(&allowed, &batch.labels.text)?.flatten_all()?.to_vec1::<f32>()?;
            let by_lesson = log_p.chunks_exact(self.catalogue.vocabulary().depth());
            found.extend(step.iter().map(|&index| owners[index]).zip(by_lesson.map(<[f32]>::to_vec)));
        }
        Ok(found)
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

    /// The loss on the data combined with that on items drawn from the lists of a step, if the loss is on lists and the
    /// step has any: windows of a long history before its last one have none. The seed says which items are drawn and
    /// what is dropped.
    fn with_lists(
        &self,
        data: Tensor,
        (set, step): (&LessonSet, &[usize]),
        (seed, dropout): (u64, f64),
    ) -> Result<Tensor> {
        let Some(alignment) = self.alignment else {
            return Ok(data);
        };
        let Drawn { lessons, log_p_k } = set.draw(step, alignment.list_items, seed);
        if lessons.is_empty() {
            return Ok(data);
        }
        let batch = Batch::new(&lessons, &self.device)?;
        let places = self.places(&lessons, log_p_k, alignment)?;
        let target = if places.is_some() { self.target(&batch)? } else { None };
        let batch = batch.with_dropout(dropout, seed.wrapping_add(OF_LISTS));
        let logits = logits(&self.network, &batch)?;
        let on_lists = self.objective.of_lists(&logits, &batch.labels.text, places.as_ref().zip(target.as_ref()))?;
        Ok(combined(&on_lists, &data, alignment.alpha)?)
    }

    /// What a loss on distributions needs to know of the places in listed items.
    fn places(&self, lessons: &[Lesson], log_p_k: Vec<f32>, alignment: &Alignment) -> Result<Option<ListPlaces>> {
        if self.options.loss == RecommenderLoss::SeqKd {
            return Ok(None);
        }
        let mask = match alignment.constrained {
            true => self.continuations.mask(lessons, &self.device)?,
            false => self.continuations.no_mask(lessons, &self.device)?,
        };
        let log_p_k = match log_p_k.len() {
            0 => None,
            places => Some(Tensor::from_vec(log_p_k, (places, 1), &self.device)?),
        };
        Ok(Some(ListPlaces { mask, log_p_k, k: alignment.lists }))
    }
}

fn logits(network: &Network, batch: &Batch) -> Result<Tensor> {
    let pass = network.forward(batch, 1)?.pop();
    Ok(pass.context("a model has one pass")?.logits)
}

impl Course for Learner<'_> {
    fn network(&self) -> &Network {
        &self.network
    }

    fn steps(&self, epoch: usize) -> Vec<Vec<usize>> {
        self.steps(&self.learned.lessons, epoch)
    }

    fn loss(&mut self, step: &[usize], _: usize, steps: u32) -> Result<(Tensor, usize)> {
        let (dropout, seed) = (self.options.dropout, seed_at(self.options.seed, u64::from(steps)));
        let batch = self.batch(&self.learned.lessons, step)?;
        let target = if self.options.loss.compares_data() { self.target(&batch)? } else { None };
        let batch = batch.with_dropout(dropout, seed);
        let data = self.objective.of(&logits(&self.network, &batch)?, &batch.labels.text, target.as_ref())?;
        let loss = self.with_lists(data, (&self.learned, step), (seed, dropout))?;
        Ok((loss, batch.before.dim(0)?))
    }

    fn measure(&mut self) -> Result<Epoch> {
        let (mut loss, mut places, mut sums) = (0.0, 0.0, Hits::default());
        for (at, step) in (0..).zip(self.steps(&self.held_out.lessons, 0)) {
            let batch = self.batch(&self.held_out.lessons, &step)?;
            let (text, target) = (&batch.labels.text, self.target(&batch)?);
            let logits = logits(&self.network, &batch)?.detach();
            let count = batch.before.dim(0)? as f64;
            let data = self.objective.of(&logits, text, target.as_ref())?;
            // The same items in every epoch, without dropout.
            let mean = self.with_lists(data, (&self.held_out, &step), (seed_at(self.options.seed, at), 0.0))?;
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
        let overlap = self.target.is_some().then_some((OVERLAP, sums.overlap / places));
        let codes = [("first code", sums.first / sums.items), ("all codes", sums.all / sums.items)];
        let shares = codes.into_iter().chain(overlap).map(|(name, share)| (name.to_owned(), share)).collect();
        let held_out_loss = loss / places;
        Ok(Epoch { held_out_loss, shares, score: -held_out_loss, ..Epoch::default() })
    }
}
