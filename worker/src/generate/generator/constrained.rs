//! What the loop does where texts follow a grammar.

use laser_engine::{EngineError, Scores};

use super::super::constraint::CANDIDATES;
use super::super::request::{Finished, Generated, StopReason, TextError};
use super::super::sequence::{Room, Sequence};
use super::Generator;

impl Generator {
    /// Lets a sequence take part, held to the grammar if there is one.
    pub(super) fn begin(&mut self, mut sequence: Sequence, room: &Room, finished: &mut Vec<Finished>) {
        if let Some(grammar) = &self.grammar {
            let parser = self.parsers.pop().unwrap_or_else(|| grammar.parser());
            if let Err(error) = sequence.constrain(parser, &self.options) {
                self.close(&mut sequence);
                return finished.push(Finished { id: sequence.request.id, result: Err(error) });
            }
        }
        self.follow(&sequence, room);
        self.active.push(sequence);
    }

    /// Cuts what the grammar does not allow out of the trees.
    pub(super) fn cut_forbidden(&mut self) {
        let drafter = self.options.drafter;
        if self.grammar.is_some() {
            self.threads.each(&mut self.active, |_, sequence| sequence.cut_forbidden(drafter));
        }
    }

    /// Candidates that a step tells of each node, and of each place of a prompt.
    pub(super) fn top_k(&self) -> usize {
        let least = if self.grammar.is_some() { CANDIDATES } else { 1 };
        // The token that is written is one of them, more often than not.
        let contested = self.active.iter().map(|sequence| sequence.request.runners_up).max();
        let contested = contested.filter(|most| *most > 0).map_or(0, |most| most + 1);
        self.options.verification.top_k().max(least).max(self.options.alignment).max(contested)
    }

    /// Finds out what the scores of a step say of the tokens that the grammar allows: all sequences go on until they
    /// need a mask, and then the engine is asked for all of them at once.
    pub(super) fn look_at_allowed(&mut self, scores: &[Scores]) -> Result<(), EngineError> {
        if self.grammar.is_none() {
            return Ok(());
        }
        let top_k = self.top_k();
        let Self { engine, threads, active, options, .. } = self;
        let part = active.iter_mut().filter(|sequence| sequence.chunk > 0);
        let mut open: Vec<(&mut Sequence, &Scores)> = part.zip(scores).collect();
        open.iter_mut().for_each(|(sequence, _)| sequence.begin_scores());
        loop {
            threads.each(&mut open, |_, (sequence, scores)| sequence.look_at(scores, options));
            open.retain(|(sequence, _)| sequence.masked_node().is_some());
            if open.is_empty() {
                return Ok(());
            }
            let nodes: Vec<_> = open.iter().filter_map(|(sequence, _)| sequence.masked_node()).collect();
            let allowed = engine.masked(&nodes, top_k)?;
            open.iter_mut().zip(allowed).for_each(|((sequence, scores), allowed)| sequence.answer(allowed, scores));
        }
    }

    /// A text that has ended. Under a grammar it is the bytes that the grammar has accepted, and those who read it can.
    pub(super) fn whole(&self, text: Generated) -> Result<Generated, TextError> {
        let Some(grammar) = &self.grammar else {
            return Ok(text);
        };
        let tokens = text.tokens.len() - usize::from(text.stop == StopReason::End);
        let accepted = grammar.text(&text.tokens[..tokens]);
        grammar.check(&accepted).map_err(TextError::Unreadable)?;
        Ok(Generated { text: accepted, ..text })
    }
}
