//! A recommender that is to be trained, and what of it decides the result.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::Tensor;
use laser_schema::{DeviceOption, Digest};

use crate::checkpoint::write_whole;
use crate::course::Trained;
use crate::epoch::Epoch;
use crate::layer::Shape;
use crate::output::{self, Tokens, WEIGHTS};
use crate::recommender::alignment::Alignment;
use crate::recommender::belongs::{BELONGS, RecommenderBelongs};
use crate::recommender::catalogue::{Catalogue, positions};
use crate::recommender::history::History;
use crate::recommender::options::RecommenderOptions;
use crate::recommender::vocabulary::{END, START};

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
    /// Its lists, for a loss on them.
    pub lists: Option<TargetLists<'a>>,
}

/// The lists of a target: of each history the items that it expects in place of the last one, best first. An empty list
/// says that there is none.
#[derive(Debug, Clone, Copy)]
pub struct TargetLists<'a> {
    /// How they are learned from.
    pub alignment: &'a Alignment,
    /// What they are a function of beside target, items, histories and `alignment`.
    pub made_by: &'a str,
    /// Those of the histories to learn from.
    pub learned: &'a [Vec<u32>],
    /// Those of the histories to measure on.
    pub held_out: &'a [Vec<u32>],
}

impl RecommenderJob<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        self.options.validate()?;
        ensure!(
            !self.learned.is_empty() && !self.held_out.is_empty(),
            "{} histories to learn from and {} to measure on: expected at least one of each",
            self.learned.len(),
            self.held_out.len()
        );
        let loss = self.options.loss;
        ensure!(!loss.has_target() || self.target.is_some(), "loss = \"{loss}\" needs a target");
        let lists = self.lists();
        ensure!(!loss.has_lists() || lists.is_some(), "loss = \"{loss}\" needs the lists of a target");
        for (lists, histories) in
            lists.iter().flat_map(|lists| [(lists.learned, self.learned), (lists.held_out, self.held_out)])
        {
            ensure!(
                lists.len() == histories.len(),
                "{} lists for {} histories: expected one of each",
                lists.len(),
                histories.len()
            );
        }
        lists.map_or(Ok(()), |lists| lists.alignment.validate())
    }

    /// The target's lists, if the loss is on them.
    pub(crate) fn lists(&self) -> Option<TargetLists<'_>> {
        self.target.and_then(|target| target.lists).filter(|_| self.options.loss.has_lists())
    }

    pub(crate) fn belongs(&self) -> RecommenderBelongs {
        let identifiers = self.catalogue.digest().to_string();
        let sequences = Digest::of_json(&[self.learned, self.held_out]).to_string();
        let target = self.target.map(|target| target.digest.to_owned());
        let function = (self.options, &identifiers, &sequences, &target);
        let training = match self.lists() {
            None => Digest::of_json(&function),
            Some(lists) => Digest::of_json(&(function, lists.alignment, lists.made_by)),
        };
        RecommenderBelongs {
            levels: self.catalogue.vocabulary().sizes(),
            max_items: self.options.max_items,
            constrained: self.options.constrained,
            identifiers,
            sequences,
            target,
            training: training.to_string(),
            kept: Epoch::default(),
        }
    }

    /// The recommender, if an earlier call has finished it. It needs no lists for that.
    ///
    /// # Errors
    /// A folder that holds a recommender of another training.
    pub fn finished(&self) -> Result<Option<Trained>> {
        let Some((belongs, history)) = output::finished::<RecommenderBelongs>(self.folder, BELONGS)? else {
            return Ok(None);
        };
        ensure!(
            belongs.training == self.belongs().training,
            "{}: holds a recommender of another training (other histories, identifiers, target or options); give \
             another folder, or remove this one",
            self.folder.display()
        );
        Ok(Some(Trained { folder: self.folder.to_owned(), kept: belongs.kept, history, is_new: false }))
    }

    pub(crate) fn shape(&self) -> Shape {
        let o = self.options;
        Shape::llama([o.hidden_size, o.intermediate_size], o.layers, [o.heads, o.kv_heads])
    }

    /// The most positions that a prompt and its answer take.
    pub(crate) fn positions(&self) -> usize {
        positions(self.options.max_items + 1, self.catalogue.vocabulary().depth())
    }

    /// Writes the folder; the weights come last, and without them there is no model.
    pub(crate) fn write(
        &self,
        belongs: &RecommenderBelongs,
        history: &[Epoch],
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
