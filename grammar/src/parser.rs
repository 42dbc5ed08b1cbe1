//! A walk along a text and back.

use std::sync::Arc;

use llguidance::Matcher;

use super::{GrammarError, told};

/// What may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// This token alone.
    Forced(u32),
    /// The end of the text alone.
    End,
    /// One of several tokens, the end possibly among them.
    Free,
}

/// Forced tokens, and how many tokens come before them.
#[derive(Debug)]
struct Run {
    start: usize,
    tokens: Vec<u32>,
}

/// Where one text stands in its grammar.
pub struct Parser {
    matcher: Matcher,
    end_of_text: Arc<[u32]>,
    /// Tokens pushed.
    length: usize,
    /// What was found to be forced at places before this one or here, in order; an empty run where nothing is.
    runs: Vec<Run>,
}

impl std::fmt::Debug for Parser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parser").field("length", &self.length).field("runs", &self.runs).finish_non_exhaustive()
    }
}

impl Parser {
    pub(super) fn new(matcher: Matcher, end_of_text: Arc<[u32]>) -> Self {
        Self { matcher, end_of_text, length: 0, runs: Vec::new() }
    }

    /// Tokens pushed and not popped.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether a token ends a text.
    #[must_use]
    pub fn ends(&self, token: u32) -> bool {
        self.end_of_text.contains(&token)
    }

    /// What may come next.
    ///
    /// # Errors
    /// [`GrammarError::Parser`].
    pub fn next_token(&mut self) -> Result<Next, GrammarError> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            return Ok(Next::End);
        }
        if self.runs.last().is_none_or(|run| run.start < self.length && run.start + run.tokens.len() <= self.length) {
            let tokens = self.matcher.compute_ff_tokens();
            self.check()?;
            self.runs.push(Run { start: self.length, tokens });
        }
        let forced = self.runs.last().and_then(|run| run.tokens.get(self.length - run.start));
        Ok(forced.map_or(Next::Free, |&token| Next::Forced(token)))
    }

    /// Whether this token may come next.
    ///
    /// # Errors
    /// [`GrammarError::Parser`].
    pub fn allows(&mut self, token: u32) -> Result<bool, GrammarError> {
        let ends = self.ends(token);
        match self.next_token()? {
            Next::Forced(forced) => Ok(forced == token),
            Next::End => Ok(ends),
            Next::Free if ends => self.may_end(),
            Next::Free => self.matcher.validate_tokens(&[token]).map(|valid| valid == 1).map_err(|e| failed(&e)),
        }
    }

    /// Whether the text may end here.
    ///
    /// # Errors
    /// [`GrammarError::Parser`].
    pub fn may_end(&mut self) -> Result<bool, GrammarError> {
        Ok(self.matcher.is_stopped() && !self.matcher.is_error()
            || self.matcher.is_accepting().map_err(|e| failed(&e))?)
    }

    /// The tokens that may come next: bit t % 32 of word t / 32 is set for token t. Tokens beyond the last word may
    /// not.
    ///
    /// # Errors
    /// [`GrammarError::Parser`], also where no token may.
    pub fn mask(&mut self) -> Result<Vec<u32>, GrammarError> {
        self.matcher.compute_mask_or_eos().map(Into::into).map_err(|e| failed(&e))
    }

    /// Moves behind this token, which is no end of text.
    ///
    /// # Errors
    /// [`GrammarError::Parser`]; the parser is of no use then.
    pub fn push(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(|e| failed(&e))?;
        self.length += 1;
        Ok(())
    }

    /// Moves back over the last tokens.
    ///
    /// # Errors
    /// [`GrammarError::Parser`]; the parser is of no use then.
    pub fn pop(&mut self, tokens: usize) -> Result<(), GrammarError> {
        self.matcher.rollback(tokens).map_err(|e| failed(&e))?;
        self.length -= tokens;
        while self.runs.pop_if(|run| run.start > self.length).is_some() {}
        Ok(())
    }

    fn check(&self) -> Result<(), GrammarError> {
        self.matcher.get_error().map_or(Ok(()), |error| Err(failed(&error)))
    }
}

fn failed(error: &dyn std::fmt::Display) -> GrammarError {
    GrammarError::Parser(told(error))
}
