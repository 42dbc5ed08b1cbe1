//! The tokens that a draft model tells of, and learns over: those of the texts that it is trained on.
//!
//! A recommender's texts need few of a vocabulary's tokens, and most of what a small draft model computes is the
//! projection to the vocabulary. So in a training tokens have numbers of their own: embedding and projection have a row
//! for each of these tokens, and others do not exist.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use candle_core::{DType, Tensor};
use laser_decode::{Candidate, Token};

use crate::lesson::Lesson;

/// The number of a token that is none of them.
pub(crate) const NONE: u32 = u32::MAX;

/// The tokens, ascending; their numbers are their places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnTokens(Vec<Token>);

impl OwnTokens {
    pub(crate) fn new(tokens: impl Iterator<Item = Token>) -> Self {
        Self(tokens.collect::<BTreeSet<_>>().into_iter().collect())
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        &self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn number(&self, token: Token) -> Option<u32> {
        self.0.binary_search(&token).ok().and_then(|at| u32::try_from(at).ok())
    }

    /// The lesson by numbers. What the target holds likely may be [none](NONE) of the tokens.
    ///
    /// # Errors
    /// A token of the lesson itself that is none of these.
    pub(crate) fn numbered(&self, lesson: &Lesson) -> Result<Lesson> {
        let number = |token: &Token| self.number(*token).with_context(|| format!("token {token} is in no text"));
        let likely =
            |candidate: &Candidate| Candidate { token: self.number(candidate.token).unwrap_or(NONE), ..*candidate };
        Ok(Lesson {
            tokens: lesson.tokens.iter().map(number).collect::<Result<_>>()?,
            prompt: lesson.prompt,
            likely: lesson.likely.iter().map(likely).collect(),
        })
    }

    /// `[vocabulary, width]`: a matrix of a row for each of the tokens, and zeros for all others.
    pub(crate) fn among_all(&self, rows: &Tensor, vocabulary: usize) -> candle_core::Result<Tensor> {
        let all = Tensor::zeros((vocabulary, rows.dim(1)?), DType::F32, rows.device())?;
        all.index_add(&Tensor::new(self.tokens(), rows.device())?, rows, 0)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn tokens_have_their_places_as_numbers() {
        let own = OwnTokens::new([70, 5, 900, 5].into_iter());
        assert_eq!((own.tokens(), own.len()), (&[5, 70, 900][..], 3));
        let candidate = |token, log_probability| Candidate { token, log_probability };
        let lesson = |tokens: &[Token], likely: Vec<Candidate>| Lesson { tokens: tokens.to_vec(), prompt: 1, likely };
        let found = own.numbered(&lesson(&[900, 5, 70], vec![candidate(6, -0.1), candidate(70, -2.5)])).unwrap();
        assert_eq!(found, lesson(&[2, 0, 1], vec![candidate(NONE, -0.1), candidate(1, -2.5)]));
        let error = own.numbered(&lesson(&[900, 6], Vec::new())).unwrap_err().to_string();
        assert_eq!(error, "token 6 is in no text");
    }

    #[test]
    fn a_matrix_among_all_has_zeros_for_the_others() {
        let rows = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let all = OwnTokens::new([3, 1].into_iter()).among_all(&rows, 5).unwrap();
        let expected = [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]];
        assert_eq!(all.to_vec2::<f32>().unwrap(), expected);
    }
}
