//! A draft model as a source: the sequences that it follows.

use std::collections::BTreeMap;
use std::time::Instant;

use laser_decode::{Terms, Token};
use laser_engine::EngineError;

use super::{DraftModel, Readable, Reader};
use crate::generate::source::{Draft, DraftSource, DraftTerms, Opening, Outcome, SequenceId, SharedPrefix, followed};

/// A draft model, and what it has of each sequence.
pub(super) struct ModelSource {
    pub(super) model: DraftModel,
    pub(super) readers: BTreeMap<SequenceId, Reader>,
}

impl DraftSource for ModelSource {
    fn reads_features(&self) -> bool {
        self.model.reads_features()
    }

    fn share_prefix(&mut self, prefix: &SharedPrefix<'_>) -> Result<(), EngineError> {
        let features: Vec<f32> = match self.reads_features() {
            true => prefix.scored().flat_map(|(scores, node)| scores.feature(node)).copied().collect(),
            false => Vec::new(),
        };
        self.model.share_prefix(prefix.tokens, &features, prefix.step_tokens)
    }

    fn forget_prefix(&mut self, tokens: &[Token]) {
        self.model.forget_prefix(tokens);
    }

    fn open(&mut self, id: SequenceId, opening: &Opening<'_>) {
        let sample = opening.sample.and_then(|sample| self.readers.get(&sample));
        let reader = self.model.open(&opening.request.prompt, opening.cached, sample, opening.capacity);
        if let Some(mut reader) = reader {
            reader.emitted(opening.begun);
            self.readers.insert(id, reader);
        }
    }

    fn draft(&mut self, drafts: &mut [&mut Draft], terms: &DraftTerms<'_>) -> Result<(), EngineError> {
        let (start, Self { model, readers }) = (Instant::now(), self);
        readers.values_mut().for_each(|reader| reader.is_current = false);
        let mut drafts: Vec<_> = followed(readers, drafts)
            .filter(|(reader, draft)| draft.nodes > 0 && model.can_read(reader, draft.nodes.max(draft.tree.len())))
            .collect();
        let mut readable: Vec<_> = drafts.iter_mut().map(|(reader, draft)| Readable::begin(reader, draft)).collect();
        let refined = Terms {
            max_nodes: 0,
            min_probability: terms.min_probability,
            end_of_text: terms.end_of_text,
            vocab_size: terms.vocab_size,
            price: terms.cost.map_or(0.0, |(cost, load)| model.price_of_node(cost, load)),
        };
        model.refine(&mut readable, terms.step_tokens, refined)?;
        let share = start.elapsed().as_secs_f64() / drafts.len().max(1) as f64;
        for (reader, draft) in drafts {
            draft.is_read |= !reader.refined.is_unread(0);
            draft.tree.clone_from(reader.refined.tree());
            draft.seconds += share;
        }
        Ok(())
    }

    fn follow(&mut self, id: SequenceId, outcome: &Outcome<'_>) {
        let Some(reader) = self.readers.get_mut(&id) else { return };
        if !outcome.tree.is_empty() {
            reader.emitted(outcome.emitted);
        }
        if let Some(kept) = outcome.kept {
            self.model.kept(reader, outcome.tree.drafted(), kept.len() - outcome.chunk);
            if self.model.reads_features() {
                kept.iter().for_each(|&node| reader.computed(outcome.scores.feature(node)));
            }
        }
        self.model.learn_from(reader);
    }

    fn stepped(&mut self, emitted: (usize, usize), seconds: f64) {
        self.model.stepped(emitted, seconds);
    }

    fn close(&mut self, id: SequenceId) {
        if let Some(reader) = self.readers.remove(&id) {
            self.model.close(&reader);
        }
    }
}
