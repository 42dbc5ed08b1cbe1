//! What counts occurrences: pools, the prompt and the output so far, the entity's previous text, and the n-grams of
//! lookahead decoding. Their counts are merged before a tree is grown, which says more than merging their trees would.

use std::collections::BTreeMap;
use std::time::Instant;

use laser_decode::{Alignment, DraftContext, Drafter, Draw, Noise, TargetScores as _, Token};
use laser_engine::EngineError;

use super::source::{Draft, DraftSource, DraftTerms, Opening, Outcome, SequenceId, SharedPrefix, followed};
use super::threads::{PARALLEL_DRAFTS_MIN, Threads};

/// The source of what counts occurrences.
pub(super) struct Counts {
    threads: Threads,
    followed: BTreeMap<SequenceId, Followed>,
    /// What prompts begin with, and what the target would have written in its place.
    prefixes: Vec<(Vec<Token>, Alignment)>,
}

/// One sequence.
struct Followed {
    context: DraftContext,
    /// Tokens of the prompt.
    prompt: usize,
}

impl Followed {
    /// Learns from a step what the target would have written in place of the prompt's tokens.
    fn align(&mut self, outcome: &Outcome<'_>) {
        let alignment = self.context.alignment_mut();
        if alignment.most() == 0 {
            return;
        }
        let missing = (self.prompt - 1).saturating_sub(alignment.places());
        (0..outcome.chunk.min(missing)).for_each(|node| alignment.push(outcome.scores.top(node)));
    }
}

impl Counts {
    /// Drafts are divided among the threads.
    pub(super) fn new(threads: Threads) -> Self {
        Self { threads, followed: BTreeMap::new(), prefixes: Vec::new() }
    }

    /// What is known of what the target would have written in place of the prompt. Options may have been others when a
    /// prefix was read.
    fn alignment(&self, opening: &Opening<'_>) -> Alignment {
        let prefix = &opening.request.prompt[..opening.cached];
        let known = match opening.sample {
            Some(sample) => self.followed.get(&sample).map(|followed| followed.context.alignment()),
            None => self.prefixes.iter().find(|(tokens, _)| tokens == prefix).map(|(_, alignment)| alignment),
        };
        let most = opening.options.alignment;
        let known = known.filter(|known| known.most() == most).cloned();
        let mut alignment = known.unwrap_or_else(|| Alignment::new(most));
        alignment.resize(opening.cached);
        alignment
    }
}

impl DraftSource for Counts {
    fn share_prefix(&mut self, prefix: &SharedPrefix<'_>) -> Result<(), EngineError> {
        if prefix.alignment > 0 {
            let mut alignment = Alignment::new(prefix.alignment);
            prefix.scored().for_each(|(scores, node)| alignment.push(scores.top(node)));
            self.prefixes.push((prefix.tokens.to_vec(), alignment));
        }
        Ok(())
    }

    fn forget_prefix(&mut self, tokens: &[Token]) {
        self.prefixes.retain(|(prefix, _)| prefix != tokens);
    }

    fn open(&mut self, id: SequenceId, opening: &Opening<'_>) {
        let &Opening { request, options, begun, vocab_size, .. } = opening;
        if options.drafter == Drafter::None {
            return;
        }
        let mut context = DraftContext::new(options.drafter, request.pool.clone(), options.end_of_drafts());
        // The engine refuses tokens that the model does not know.
        let known = |token: &&Token| (**token as usize) < vocab_size;
        let previous: Vec<Token> = request.previous.iter().take_while(known).copied().collect();
        if !previous.is_empty() {
            context.add_previous(&previous);
        }
        context.extend(&request.prompt);
        *context.alignment_mut() = self.alignment(opening);
        if let Some(sampling) = options.sampling {
            context.draw_by(Draw { sampling, noise: Noise::new(request.key) });
        }
        context.extend(begun);
        self.followed.insert(id, Followed { context, prompt: request.prompt.len() });
    }

    fn draft(&mut self, drafts: &mut [&mut Draft], _terms: &DraftTerms<'_>) -> Result<(), EngineError> {
        let start = Instant::now();
        let mut drafts: Vec<_> = followed(&mut self.followed, drafts).collect();
        self.threads.each(&mut drafts, |_, (followed, draft)| {
            let start = Instant::now();
            followed.context.draft(draft.reach, &mut draft.tree);
            if draft.reach > 0 {
                draft.rationed = start.elapsed().as_secs_f64();
            }
        });
        if drafts.len() >= PARALLEL_DRAFTS_MIN {
            // The step waited for them all at once.
            let drafting: f64 = drafts.iter().map(|(_, draft)| draft.rationed).sum();
            let share = (start.elapsed().as_secs_f64() / drafting).min(1.0);
            drafts.iter_mut().for_each(|(_, draft)| draft.rationed *= share);
        }
        drafts.iter_mut().for_each(|(_, draft)| draft.seconds += draft.rationed);
        Ok(())
    }

    fn follow(&mut self, id: SequenceId, outcome: &Outcome<'_>) {
        let Some(followed) = self.followed.get_mut(&id) else { return };
        followed.align(outcome);
        if !outcome.tree.is_empty() {
            let root = outcome.chunk - 1;
            followed.context.observe(outcome.tree, |node| outcome.scores.prediction(root + node).choice.token);
        }
        followed.context.extend(outcome.emitted);
    }

    fn close(&mut self, id: SequenceId) {
        self.followed.remove(&id);
    }
}
