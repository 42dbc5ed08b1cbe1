//! The longest history whose prompt keeps the budget.
//!
//! Prompts grow by about as much with each interaction, so a line through what has been tried says where the budget is
//! met. Every fourth try halves the span instead, for histories of which a few interactions are much longer than the rest.
//! The first try is what the history before could keep. Where a search begins changes its tries and not its outcome.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::RenderedPrompt;

/// Where the first of all searches begins: at about 20 tokens an interaction, two thirds of the default budget.
const FIRST_HISTORY: usize = 32;

/// How many interactions the last history kept of which some were dropped.
#[derive(Debug)]
pub(super) struct LastKept(AtomicUsize);

impl Default for LastKept {
    fn default() -> Self {
        Self(AtomicUsize::new(FIRST_HISTORY))
    }
}

/// A search for the most interactions, of `longest`, with which a prompt has at most `budget` tokens.
#[derive(Debug)]
pub(super) struct Search {
    longest: usize,
    budget: usize,
    first: usize,
    tries: usize,
    /// The longest prompt so far that fits.
    best: Option<RenderedPrompt>,
    /// The fewest interactions that do not fit, and their tokens; before the first one more than there are.
    too_long: (usize, usize),
}

impl Search {
    pub(super) fn new(longest: usize, budget: usize, last: &LastKept) -> Self {
        Self {
            longest,
            budget,
            first: last.0.load(Ordering::Relaxed),
            tries: 0,
            best: None,
            too_long: (longest + 1, 0),
        }
    }

    /// How many interactions to try, or `None` if all is known.
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
            return Some(self.longest.min(self.first));
        }
        let meets = if too_many > self.longest {
            // Twice the last try at most, so that no prompt is much over twice the budget.
            (self.budget * fits / tokens.max(1)).min(2 * fits)
        } else if self.tries % 4 == 3 {
            untried.midpoint(too_many)
        } else {
            fits + (self.budget - tokens) * (too_many - fits) / (over - tokens)
        };
        Some(meets.clamp(untried, too_many - 1))
    }

    /// Takes the prompt that was asked for.
    pub(super) fn tell(&mut self, prompt: RenderedPrompt) {
        self.tries += 1;
        let tokens = prompt.tokens.len();
        if tokens <= self.budget {
            self.best = Some(prompt);
        } else {
            self.too_long = (prompt.history_used, tokens);
        }
    }

    /// The longest prompt that fits, or the tokens of one without history. The next search begins where this one ends.
    pub(super) fn end(self, last: &LastKept) -> Result<RenderedPrompt, usize> {
        let best = self.best.ok_or(self.too_long.1)?;
        if best.history_used < self.longest {
            last.0.store(best.history_used.max(1), Ordering::Relaxed);
        }
        Ok(best)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Searches among prompts of `fixed` tokens and those of the latest interactions, which are given oldest first.
    fn search(
        fixed: usize,
        interactions: &[usize],
        budget: usize,
        last: &LastKept,
    ) -> (Result<usize, usize>, usize) {
        let mut search = Search::new(interactions.len(), budget, last);
        while let Some(kept) = search.next() {
            let latest = interactions.iter().rev().take(kept);
            search.tell(RenderedPrompt {
                text: String::new(),
                tokens: vec![0; fixed + latest.sum::<usize>()],
                history_used: kept,
            });
        }
        let tries = search.tries;
        let best = search.end(last);
        (best.map(|best| best.history_used), tries)
    }

    #[test]
    fn interactions_of_like_length_take_few_tries() {
        let like: Vec<usize> = (0..500).map(|i| 18 + i % 5).collect();
        let tries = (100..2000).map(|budget| search(60, &like, budget, &LastKept::default()).1);
        let tries: Vec<usize> = tries.collect();
        let mean = tries.iter().sum::<usize>() as f64 / tries.len() as f64;
        assert!(
            mean < 5.0 && tries.iter().all(|&tries| tries <= 7),
            "{mean}, {tries:?}"
        );
    }

    #[test]
    fn what_the_last_history_kept_is_tried_first() {
        let last = LastKept::default();
        let like = |seed: usize| {
            (0..300)
                .map(|i| 18 + (i * 7 + seed) % 5)
                .collect::<Vec<_>>()
        };
        assert!(search(60, &like(0), 200, &last).1 > 3);
        for seed in 1..50 {
            let (kept, tries) = search(60, &like(seed), 200, &last);
            assert!(tries <= 3, "{tries} tries for {kept:?}");
            // A history that fits whole says nothing of the others.
            assert_eq!(search(60, &[20; 3], 200, &last), (Ok(3), 1));
        }
    }

    proptest! {
        #[test]
        fn finds_the_longest_that_fits(
            fixed in 0usize..50,
            interactions in prop::collection::vec(prop_oneof![1usize..30, 1usize..400], 0..300),
            budget in 1usize..3000,
            first in 1usize..400,
        ) {
            let (kept, tries) = search(fixed, &interactions, budget, &LastKept(first.into()));
            let tokens = |kept| fixed + interactions.iter().rev().take(kept).sum::<usize>();
            let longest = (0..=interactions.len()).rev().find(|&kept| tokens(kept) <= budget);
            prop_assert_eq!(kept, longest.ok_or(fixed));
            let log = usize::BITS - interactions.len().leading_zeros();
            prop_assert!(tries <= 4 * log as usize + 4, "{} tries", tries);
        }
    }
}
