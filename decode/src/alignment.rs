//! Alignment sampling: what the target would have written in place of the prompt's tokens.
//!
//! A text that copies from its prompt does not always copy to the letter. Where a draft takes a token from the prompt,
//! the tokens that the target ranks above it at that place are drafted beside it (AASD, arXiv:2505.13204, section 3.2).
//! The prefill tells which these are, if all nodes of the prompt are scored.

use crate::Token;
use crate::verify::Candidate;

/// The target's most probable tokens at the places of a prompt, in order from its second token on: nothing tells of the
/// first one. By default none are kept at any place.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Alignment {
    most: usize,
    candidates: Vec<Candidate>,
}

impl Alignment {
    /// Stands for a token that is not known.
    const UNKNOWN: Candidate = Candidate { token: Token::MAX, log_probability: f32::NEG_INFINITY };

    /// Keeps the `most` most probable tokens of a place; the paper keeps 2.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, candidates: Vec::new() }
    }

    /// Candidates that are kept of a place.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Places that are known, which is the place of the last one: they begin with 1.
    #[must_use]
    pub fn places(&self) -> usize {
        self.candidates.len().checked_div(self.most).unwrap_or(0)
    }

    /// Adds the next place, where the target has these candidates, most probable first.
    pub fn push(&mut self, top: &[Candidate]) {
        let known = top.iter().copied().chain(std::iter::repeat(Self::UNKNOWN));
        self.candidates.extend(known.take(self.most));
    }

    /// Ends with the place `last`: forgets those behind it, and knows nothing of those that it lacks.
    pub fn resize(&mut self, last: usize) {
        self.candidates.resize(last * self.most, Self::UNKNOWN);
    }

    /// Iterates over the tokens that the target ranks above `copied` at a place of the prompt, most probable first.
    pub(crate) fn above(&self, place: usize, copied: Token) -> impl Iterator<Item = Candidate> + '_ {
        let kept = place.checked_sub(1).and_then(|row| self.candidates.get(row * self.most..(row + 1) * self.most));
        let better = kept.unwrap_or_default().iter().copied().take_while(move |candidate| candidate.token != copied);
        better.filter(|candidate| *candidate != Self::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: [Candidate; 3] = [
        Candidate { token: 7, log_probability: -0.5 },
        Candidate { token: 8, log_probability: -1.5 },
        Candidate { token: 9, log_probability: -2.5 },
    ];

    fn above(alignment: &Alignment, place: usize, copied: Token) -> Vec<Token> {
        alignment.above(place, copied).map(|candidate| candidate.token).collect()
    }

    #[test]
    fn only_tokens_ranked_above_the_copied_one_are_told() {
        let mut alignment = Alignment::new(2);
        alignment.push(&TOP);
        assert_eq!(alignment.places(), 1);
        assert_eq!(above(&alignment, 1, 7), []);
        assert_eq!(above(&alignment, 1, 8), [7]);
        assert_eq!(above(&alignment, 1, 9), [7, 8], "the third is not kept, so both of the others rank above it");
        assert_eq!((above(&alignment, 0, 9), above(&alignment, 2, 9)), (vec![], vec![]));
    }

    #[test]
    fn places_that_are_not_known_have_nothing() {
        let mut alignment = Alignment::new(2);
        alignment.resize(2);
        alignment.push(&TOP[..1]);
        assert_eq!(alignment.places(), 3);
        assert_eq!((above(&alignment, 2, 9), above(&alignment, 3, 9)), (vec![], vec![7]));
        alignment.resize(1);
        assert_eq!((alignment.places(), above(&alignment, 3, 9)), (1, vec![]));
    }

    #[test]
    fn nothing_is_kept_by_default() {
        let mut alignment = Alignment::default();
        alignment.push(&TOP);
        alignment.resize(5);
        assert_eq!((alignment.places(), above(&alignment, 1, 9)), (0, vec![]));
    }
}
