//! Finds the longest history whose prompt keeps the budget.
//!
//! Prompts grow by about the same amount with each interaction, so a line through the tries predicts where the budget
//! is met. Every fourth try halves the span instead, for histories in which a few interactions are much longer than the
//! rest.

use super::RenderedPrompt;

/// Tokens of the budget per interaction of the first try. Interactions have about 20 tokens, and the guess of two
/// thirds of the budget is rarely far over it. It must not depend on other entities: with templates whose prompts do
/// not grow with every interaction, the outcome depends on the tries.
const FIRST_TOKENS: usize = 30;

/// A search for the most interactions, up to `longest`, with which a prompt has at most `budget` tokens.
#[derive(Debug)]
pub(super) struct Search {
    longest: usize,
    budget: usize,
    tries: usize,
    /// The longest prompt so far that fits.
    pub(super) best: Option<RenderedPrompt>,
    /// The fewest interactions that do not fit, with their tokens; before the first such try, one more than exist.
    pub(super) too_long: (usize, usize),
}

impl Search {
    pub(super) fn new(longest: usize, budget: usize) -> Self {
        Self { longest, budget, tries: 0, best: None, too_long: (longest + 1, 0) }
    }

    /// Returns the number of interactions to try, or `None` if the result is known.
    pub(super) fn next(&self) -> Option<usize> {
        let (fits, tokens) = match &self.best {
            Some(best) => (best.history_used, best.tokens.len()),
            None => (0, 0),
        };
        let untried = fits + usize::from(self.best.is_some());
        let (too_many, over) = self.too_long;
        if untried == too_many {
            return None;
        }
        if self.tries == 0 {
            return Some(self.longest.min((self.budget / FIRST_TOKENS).max(1)));
        }
        let meets = if too_many > self.longest {
            // At most twice the last try, so that no prompt is much over twice the budget.
            (self.budget * fits / tokens.max(1)).min(2 * fits)
        } else if self.tries % 4 == 3 {
            untried.midpoint(too_many)
        } else {
            fits + (self.budget - tokens) * (too_many - fits) / (over - tokens)
        };
        Some(meets.clamp(untried, too_many - 1))
    }

    /// Records the prompt of the requested number of interactions.
    pub(super) fn tell(&mut self, prompt: RenderedPrompt) {
        self.tries += 1;
        let tokens = prompt.tokens.len();
        if tokens <= self.budget {
            self.best = Some(prompt);
        } else {
            self.too_long = (prompt.history_used, tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Searches among prompts of `fixed` tokens plus those of the latest interactions, which are given oldest first.
    fn search(fixed: usize, interactions: &[usize], budget: usize) -> (Option<usize>, Search) {
        let mut search = Search::new(interactions.len(), budget);
        while let Some(kept) = search.next() {
            let latest = interactions.iter().rev().take(kept);
            search.tell(RenderedPrompt {
                text: String::new(),
                tokens: vec![0; fixed + latest.sum::<usize>()],
                history_used: kept,
            });
        }
        (search.best.as_ref().map(|best| best.history_used), search)
    }

    #[test]
    fn interactions_of_like_length_take_few_tries() {
        let like: Vec<usize> = (0..500).map(|i| 18 + i % 5).collect();
        let tries = (100..2000).map(|budget| search(60, &like, budget).1.tries);
        let tries: Vec<usize> = tries.collect();
        let mean = tries.iter().sum::<usize>() as f64 / tries.len() as f64;
        assert!(mean < 5.0 && tries.iter().all(|&tries| tries <= 7), "{mean}, {tries:?}");
    }

    proptest! {
        #[test]
        fn finds_the_longest_that_fits(
            fixed in 0usize..50,
            interactions in prop::collection::vec(prop_oneof![1usize..30, 1usize..400], 0..300),
            budget in 1usize..3000,
        ) {
            let (kept, search) = search(fixed, &interactions, budget);
            let tokens = |kept| fixed + interactions.iter().rev().take(kept).sum::<usize>();
            let longest = (0..=interactions.len()).rev().find(|&kept| tokens(kept) <= budget);
            prop_assert_eq!(kept, longest);
            let log = usize::BITS - interactions.len().leading_zeros();
            prop_assert!(search.tries <= 4 * log as usize + 4, "{} tries", search.tries);
            prop_assert!(longest.is_some() || search.too_long == (0, fixed));
        }
    }
}
