//! What drafts: one trait, whether it counts occurrences or reads trees.
//!
//! The sources of a step follow each other, and there is one tree for each sequence. Each source gets it with the
//! probabilities of the nodes that are there already and leaves it with its own opinion in them: what [counts
//! occurrences](super::counts) grows trees, a [draft model](super::DraftModel) reads them, weighs both opinions and
//! grows them again. So what sources draft is merged by calibrated probability, and what is left in the end is cut by
//! one budget. No source changes a text, so one that fails is dropped.
//!
//! What a source has of a sequence (matches, a cache) it keeps under the sequence's id, and follows what the target
//! says of the sequence.

use std::collections::BTreeMap;

use laser_decode::{DraftTree, Noise, Token};
use laser_engine::{EngineError, Scores};

use super::options::GenerateOptions;
use super::request::Request;
use crate::cost::{StepCost, StepLoad};

/// The name of a sequence among those of its generator; later ones have greater ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SequenceId(pub(super) u64);

/// A sequence that begins.
#[derive(Debug)]
pub struct Opening<'a> {
    /// What is to be generated.
    pub request: &'a Request,
    /// How.
    pub options: &'a GenerateOptions,
    /// What the text is forced to begin with.
    pub begun: &'a [Token],
    /// Tokens of the prompt that the target has cached already: those of a shared prefix, or those that it computed for
    /// `sample`, another text of the same prompt.
    pub cached: usize,
    /// See `cached`.
    pub sample: Option<SequenceId>,
    /// Tokens that it may grow to, with the nodes of a step.
    pub capacity: usize,
    /// The target's, in tokens; a tokenizer may know more.
    pub vocab_size: usize,
}

/// What prompts begin with.
#[derive(Debug)]
pub struct SharedPrefix<'a> {
    /// Its tokens.
    pub tokens: &'a [Token],
    /// What the target says of them, in chunks of `step_tokens`: features if a source reads them, and the most probable
    /// tokens unless `alignment` is 0.
    pub scores: &'a [Scores],
    /// At least 1.
    pub step_tokens: usize,
    /// As in [`GenerateOptions`].
    pub alignment: usize,
}

impl SharedPrefix<'_> {
    /// What the target says of each token: the scores, and its node in them.
    pub fn scored(&self) -> impl Iterator<Item = (&Scores, usize)> {
        (0..self.tokens.len()).map(|place| (&self.scores[place / self.step_tokens], place % self.step_tokens))
    }
}

/// What is drafted for a sequence in one step.
#[derive(Debug, Default)]
pub struct Draft {
    /// Whose it is.
    pub id: SequenceId,
    /// The tree below the last token that is known. A node's probability is that of the text coming to it, as all
    /// sources so far see it.
    pub tree: DraftTree,
    /// Nodes that it may have.
    pub nodes: usize,
    /// Of these as many as the budget has had use for of late; none while it lets the sequence rest. A source that
    /// weighs its own costs goes by `nodes`.
    pub reach: usize,
    /// Tokens that the text may still get.
    pub left: usize,
    /// The noise of the next token, if it is drawn.
    pub noise: Option<Noise>,
    /// Seconds that the step has waited for it, and those of them that the budget rations: of sources that go by
    /// `reach`.
    pub seconds: f64,
    /// See `seconds`.
    pub rationed: f64,
    /// Whether a model has read the tree.
    pub is_read: bool,
}

/// What holds for all drafts of a step.
#[derive(Debug)]
pub struct DraftTerms<'a> {
    /// Tokens of a forward, at most.
    pub step_tokens: usize,
    /// The path probability below which nothing is drafted.
    pub min_probability: f32,
    /// Nothing is drafted behind it.
    pub end_of_text: Token,
    /// The target's, in tokens.
    pub vocab_size: usize,
    /// Where drafts adapt: what the target's forward costs, and about what the one of this step has to do.
    pub cost: Option<(&'a StepCost, StepLoad)>,
}

/// What became of a sequence's part of a step.
#[derive(Debug)]
pub struct Outcome<'a> {
    /// What the target says of its segment: first `chunk` tokens that were known, then the drafted nodes.
    pub scores: &'a Scores,
    /// See `scores`.
    pub chunk: usize,
    /// What was drafted, as far as it was verified. Its root is the last token of the chunk; it is empty if the step
    /// did not come to the end of the prompt.
    pub tree: &'a DraftTree,
    /// The tokens that the text goes on with.
    pub emitted: &'a [Token],
    /// Places in the segment that stay in the cache; none if the text has ended.
    pub kept: Option<&'a [usize]>,
}

/// Drafts, and learns from what becomes of it.
pub trait DraftSource: Send {
    /// Whether it reads the target's features, which are in the scores then.
    fn reads_features(&self) -> bool {
        false
    }

    /// Gets to know what prompts begin with.
    ///
    /// # Errors
    /// If it cannot draft any longer.
    fn share_prefix(&mut self, prefix: &SharedPrefix<'_>) -> Result<(), EngineError>;

    /// Forgets it again.
    fn forget_prefix(&mut self, tokens: &[Token]);

    /// Begins to follow a sequence, if it has room.
    fn open(&mut self, id: SequenceId, opening: &Opening<'_>);

    /// Drafts for those of the sequences that it follows, which are in the order of their ids; adds to each the seconds
    /// that it took.
    ///
    /// # Errors
    /// If it cannot draft any longer.
    fn draft(&mut self, drafts: &mut [&mut Draft], terms: &DraftTerms<'_>) -> Result<(), EngineError>;

    /// Follows a sequence and learns what its draft was worth.
    fn follow(&mut self, id: SequenceId, outcome: &Outcome<'_>);

    /// Learns from a whole step: the tokens that it emitted in so many texts, and its seconds.
    fn stepped(&mut self, _emitted: (usize, usize), _seconds: f64) {}

    /// Gives back what it has of a sequence.
    fn close(&mut self, id: SequenceId);
}

/// Lets all sources do what may fail. Those that fail are dropped.
pub(super) fn with_each(
    sources: &mut Vec<Box<dyn DraftSource>>,
    mut work: impl FnMut(&mut dyn DraftSource) -> Result<(), EngineError>,
) {
    sources.retain_mut(|source| {
        let outcome = work(source.as_mut());
        if let Err(error) = &outcome {
            tracing::warn!(%error, "a draft model failed; going on without it");
        }
        outcome.is_ok()
    });
}

/// The drafts of the sequences that a source follows, with what it has of these.
pub(super) fn followed<'a, S>(
    states: &'a mut BTreeMap<SequenceId, S>,
    drafts: &'a mut [&mut Draft],
) -> impl Iterator<Item = (&'a mut S, &'a mut Draft)> {
    let mut states = states.iter_mut().peekable();
    drafts.iter_mut().filter_map(move |draft| {
        while states.next_if(|(id, _)| **id < draft.id).is_some() {}
        let (_, state) = states.next_if(|(id, _)| **id == draft.id)?;
        Some((state, &mut **draft))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_meet_what_is_known_of_their_sequences() {
        let mut states = BTreeMap::from([1, 2, 4, 7, 9].map(|id| (SequenceId(id), 10 * id)));
        let mut drafts = [0, 2, 3, 7, 8].map(|id| Draft { id: SequenceId(id), ..Draft::default() });
        let mut drafts: Vec<_> = drafts.iter_mut().collect();
        let met: Vec<_> = followed(&mut states, &mut drafts).map(|(state, draft)| (*state, draft.id.0)).collect();
        assert_eq!(met, [(20, 2), (70, 7)]);
    }
}
