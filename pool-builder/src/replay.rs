//! Replay: known texts stand for the target's strict output, so drafting is measured without a model.
//!
//! Each step drafts from the context, accepts the longest drafted branch that the text continues with, and adds one
//! more token of the text, as strict verification would. Measured are acceptance (exact) and the time of drafting (on
//! this machine, at this moment).

use std::time::{Duration, Instant};

use laser_decode::{DraftContext, DraftTree, Drafter, Pool, Token};
use serde::Serialize;

/// A text to replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplayText {
    /// The prompt. Without one, the text's first token is given.
    pub prompt: Vec<Token>,
    /// The entity's own previous text; empty if there is none.
    pub previous: Vec<Token>,
    /// The model's output. Its end is a token to draft like any other.
    pub text: Vec<Token>,
}

/// Number of classes of estimated path probability: each is half the one before, the last is open.
pub const RELIABILITY_BINS: usize = 10;

/// Drafted tokens of one class of estimated path probability.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ReliabilityBin {
    /// Number of drafted tokens.
    pub drafted: u64,
    /// Number of accepted ones.
    pub accepted: u64,
    /// Sum of their estimates: equal to `accepted` if the estimates are right.
    pub estimated: f64,
}

/// The result of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Texts replayed.
    pub texts: u64,
    /// Steps: forwards of the target.
    pub steps: u64,
    /// Tokens generated, including the ends of texts.
    pub tokens: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Tokens drafted and accepted.
    pub accepted: u64,
    /// The drafted tokens by their estimated probability: 1 to 1/2, 1/2 to 1/4, ...
    pub reliability: [ReliabilityBin; RELIABILITY_BINS],
    /// Mean drafting time per step in microseconds, including the update of the temporary branches.
    pub draft_us_mean: f64,
    /// Median drafting time per step in microseconds.
    pub draft_us_p50: f64,
    /// 99th percentile of the drafting time per step in microseconds.
    pub draft_us_p99: f64,
}

impl ReplayReport {
    /// Accepted draft tokens per step (the paper's AAL).
    pub fn accepted_per_step(&self) -> f64 {
        ratio(self.accepted as f64, self.steps)
    }

    /// Tokens per step; plain decoding has one.
    pub fn tokens_per_step(&self) -> f64 {
        ratio(self.tokens as f64, self.steps)
    }

    /// Tokens per second if a forward takes `step_us` microseconds.
    pub fn tokens_per_second(&self, step_us: f64) -> f64 {
        1e6 * self.tokens_per_step() / (step_us + self.draft_us_mean)
    }
}

/// The class of a probability.
fn bin(probability: f32) -> usize {
    let lower_bounds = std::iter::successors(Some(0.5), |bound| Some(bound / 2.0));
    let above = lower_bounds.take(RELIABILITY_BINS - 1);
    above.take_while(|&bound| probability < bound).count()
}

fn ratio(of: f64, to: u64) -> f64 {
    if to == 0 { 0.0 } else { of / to as f64 }
}

/// Replays `texts` one after the other, each with up to `nodes` drafted tokens per step. `end_of_text` must be the
/// pool's.
pub fn replay(
    texts: &[ReplayText],
    pool: Option<&Pool>,
    drafter: Drafter,
    nodes: usize,
    end_of_text: Token,
) -> ReplayReport {
    let mut report = ReplayReport { texts: texts.len() as u64, ..Default::default() };
    let mut times = Vec::new();
    let mut tree = DraftTree::new();
    for text in texts {
        let mut context = DraftContext::new(drafter, pool.cloned(), end_of_text);
        if !text.previous.is_empty() {
            context.add_previous(&text.previous);
        }
        let target: Vec<Token> = text.text.iter().copied().chain([end_of_text]).collect();
        let given = usize::from(text.prompt.is_empty());
        context.extend(&text.prompt);
        let (mut read, mut done) = (0, given);
        while done < target.len() {
            let start = Instant::now();
            context.extend(&target[read..done]);
            context.draft(nodes, &mut tree);
            times.push(start.elapsed());
            let accepted = report.count(&tree, &target[done..]);
            read = done;
            done = target.len().min(done + accepted + 1);
            report.steps += 1;
        }
        report.tokens += (target.len() - given) as u64;
    }
    report.set_times(times);
    report
}

/// Iterates over the nodes, from below the root on, whose tokens are those of `target`.
fn accepted<'a>(tree: &'a DraftTree, target: &'a [Token]) -> impl Iterator<Item = usize> + 'a {
    let mut node = 0;
    target.iter().map_while(move |token| {
        node = tree.children(node).find(|&child| tree.tokens()[child] == *token)?;
        Some(node)
    })
}

impl ReplayReport {
    /// Counts the drafted and accepted tokens of a step and returns the number of accepted ones.
    fn count(&mut self, tree: &DraftTree, target: &[Token]) -> usize {
        for &probability in tree.probabilities().iter().skip(1) {
            let bin = &mut self.reliability[bin(probability)];
            bin.drafted += 1;
            bin.estimated += f64::from(probability);
        }
        self.drafted += tree.drafted() as u64;
        let mut count = 0;
        for node in accepted(tree, target) {
            self.reliability[bin(tree.probabilities()[node])].accepted += 1;
            count += 1;
        }
        self.accepted += count as u64;
        count
    }

    fn set_times(&mut self, mut times: Vec<Duration>) {
        times.sort_unstable();
        let us = |time: &Duration| time.as_secs_f64() * 1e6;
        let percentile = |of: usize| times.get(times.len().saturating_sub(1) * of / 100).map_or(0.0, us);
        self.draft_us_mean = ratio(times.iter().map(us).sum(), times.len() as u64);
        (self.draft_us_p50, self.draft_us_p99) = (percentile(50), percentile(99));
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use laser_decode::{PoolMeta, build_pool};

    use super::*;

    const END: Token = 0;

    fn pool(texts: &[Vec<Token>]) -> Pool {
        let meta = PoolMeta { name: "p".into(), tokenizer: [1; 32], vocab_size: 100, end_of_text: END };
        Pool::open(Bytes::from(build_pool(&meta, texts.to_vec()).unwrap())).unwrap()
    }

    fn text(text: &[Token]) -> ReplayText {
        ReplayText { text: text.to_vec(), ..Default::default() }
    }

    #[test]
    fn a_text_that_the_pool_has_is_accepted_whole() {
        let known: Vec<Token> = (1..9).collect();
        let pool = pool(std::slice::from_ref(&known));
        let report = replay(&[text(&known)], Some(&pool), Drafter::RawFrequency { max_ngram: 4 }, 16, END);
        // The first token is given, seven and the end are drafted: accepted in one step.
        assert_eq!((report.steps, report.tokens, report.accepted), (1, 8, 8));
        assert_eq!(report.accepted_per_step(), 8.0);
    }

    #[test]
    fn drafted_tokens_are_classed_by_their_estimates() {
        for (probability, expected) in [(1.0, 0), (0.5, 0), (0.49, 1), (0.25, 1), (0.2, 2), (0.0, 9)] {
            assert_eq!(bin(probability), expected, "{probability}");
        }
        let pool = pool(&[vec![1, 2, 3], vec![1, 2, 4], vec![1, 5]]);
        let drafter = Drafter::default();
        let report = replay(&[text(&[1, 2, 3])], Some(&pool), drafter, 16, END);
        let sum = |of: fn(&ReliabilityBin) -> u64| report.reliability.iter().map(of).sum::<u64>();
        assert_eq!(sum(|bin| bin.drafted), report.drafted);
        assert_eq!(sum(|bin| bin.accepted), report.accepted);
        for bin in report.reliability.iter().filter(|bin| bin.drafted > 0) {
            assert!(bin.accepted <= bin.drafted && bin.estimated <= bin.drafted as f64, "{bin:?}");
        }
    }

    #[test]
    fn plain_decoding_takes_a_step_a_token() {
        let texts = [text(&[1, 2, 3]), text(&[4]), text(&[])];
        let report = replay(&texts, None, Drafter::None, 16, END);
        assert_eq!((report.texts, report.steps, report.tokens, report.drafted), (3, 4, 4, 0));
        assert_eq!(report.tokens_per_step(), 1.0);
        assert!((report.tokens_per_second(1e6) - 1.0).abs() < 0.1, "{report:?}");
        assert_eq!(replay(&[], None, Drafter::None, 16, END), ReplayReport::default());
    }

    #[test]
    fn a_prompt_is_context_and_the_previous_text_a_source() {
        let all: Vec<Token> = (1..9).collect();
        let prompted = ReplayText { prompt: vec![50], text: all.clone(), ..Default::default() };
        let report = replay(std::slice::from_ref(&prompted), None, Drafter::default(), 16, END);
        assert_eq!((report.tokens, report.accepted), (9, 0));
        let known = ReplayText { previous: all, ..prompted };
        let report = replay(&[known], None, Drafter::default(), 16, END);
        assert!(report.accepted >= 6, "{report:?}");
    }

    #[test]
    fn the_walk_follows_the_branch_that_the_text_takes() {
        let mut tree = DraftTree::new();
        tree.reset(9);
        let source = laser_decode::Source::Pool;
        let left = tree.push(0, 1, 0.5, source);
        let right = tree.push(0, 2, 0.4, source);
        tree.push(left, 3, 0.3, source);
        tree.push(right, 4, 0.2, source);
        for (target, expected) in [([2, 4, 1], 2), ([2, 3, 1], 1), ([1, 3, 3], 2), ([3, 1, 1], 0)] {
            assert_eq!(accepted(&tree, &target).count(), expected, "{target:?}");
        }
    }
}
