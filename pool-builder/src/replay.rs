//! Replay: known texts play the target's strict output, so drafting is measured without a model.
//!
//! In each step the context is drafted from, the longest drafted branch that the text continues with is
//! accepted, and one more token of the text follows, as strict verification would have it. What is
//! measured is acceptance (exact) and the time of drafting (of this machine, at this moment).

use std::time::{Duration, Instant};

use laser_decode::{DraftContext, DraftTree, Drafter, Pool, Token};
use serde::Serialize;

/// A text to replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplayText {
    /// What the model was asked. Without a prompt the text's first token is given.
    pub prompt: Vec<Token>,
    /// The entity's own previous text; empty if there is none.
    pub previous: Vec<Token>,
    /// What the model answers. Its end is a token to draft like any other.
    pub text: Vec<Token>,
}

/// What a replay found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Texts replayed.
    pub texts: u64,
    /// Steps: forwards of the target.
    pub steps: u64,
    /// Tokens these gave, the ends of texts included.
    pub tokens: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Tokens drafted and accepted.
    pub accepted: u64,
    /// Mean time of a step's drafting in microseconds, the update of the temporary branches included.
    pub draft_us_mean: f64,
    /// Median of the same.
    pub draft_us_p50: f64,
    /// 99th percentile of the same.
    pub draft_us_p99: f64,
}

impl ReplayReport {
    /// Accepted draft tokens a step (the paper's AAL).
    pub fn accepted_per_step(&self) -> f64 {
        ratio(self.accepted as f64, self.steps)
    }

    /// Tokens a step; plain decoding gives one.
    pub fn tokens_per_step(&self) -> f64 {
        ratio(self.tokens as f64, self.steps)
    }

    /// Seconds of drafting a text (the paper's ART).
    pub fn draft_seconds_per_text(&self) -> f64 {
        ratio(self.draft_us_mean * self.steps as f64 / 1e6, self.texts)
    }

    /// Tokens a second if a forward takes `step_us` microseconds.
    pub fn tokens_per_second(&self, step_us: f64) -> f64 {
        1e6 * self.tokens_per_step() / (step_us + self.draft_us_mean)
    }
}

fn ratio(of: f64, to: u64) -> f64 {
    if to == 0 { 0.0 } else { of / to as f64 }
}

/// Replays `texts` one after the other, each with up to `nodes` drafted tokens a step. `end_of_text` must
/// be the pool's.
pub fn replay(
    texts: &[ReplayText],
    pool: Option<&Pool>,
    drafter: Drafter,
    nodes: usize,
    end_of_text: Token,
) -> ReplayReport {
    let mut report = ReplayReport {
        texts: texts.len() as u64,
        ..Default::default()
    };
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
            let accepted = accepted(&tree, &target[done..]);
            read = done;
            done = target.len().min(done + accepted + 1);
            report.steps += 1;
            report.drafted += tree.drafted() as u64;
            report.accepted += accepted as u64;
        }
        report.tokens += (target.len() - given) as u64;
    }
    report.set_times(times);
    report
}

/// How many tokens of `target` the tree has from its root on.
fn accepted(tree: &DraftTree, target: &[Token]) -> usize {
    let mut node = 0;
    for (accepted, token) in target.iter().enumerate() {
        match tree
            .children(node)
            .find(|&child| tree.tokens()[child] == *token)
        {
            Some(child) => node = child,
            None => return accepted,
        }
    }
    target.len()
}

impl ReplayReport {
    fn set_times(&mut self, mut times: Vec<Duration>) {
        times.sort_unstable();
        let us = |time: &Duration| time.as_secs_f64() * 1e6;
        let percentile = |of: usize| {
            times
                .get(times.len().saturating_sub(1) * of / 100)
                .map_or(0.0, us)
        };
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
        let meta = PoolMeta {
            name: "p".into(),
            tokenizer: [1; 32],
            vocab_size: 100,
            end_of_text: END,
        };
        Pool::open(Bytes::from(build_pool(&meta, texts).unwrap())).unwrap()
    }

    fn text(text: &[Token]) -> ReplayText {
        ReplayText {
            text: text.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn a_text_that_the_pool_has_is_accepted_whole() {
        let known: Vec<Token> = (1..9).collect();
        let pool = pool(std::slice::from_ref(&known));
        let report = replay(
            &[text(&known)],
            Some(&pool),
            Drafter::RawFrequency { max_ngram: 4 },
            16,
            END,
        );
        // The first token is given, seven and the end are drafted: accepted in one step.
        assert_eq!((report.steps, report.tokens, report.accepted), (1, 8, 8));
        assert_eq!(report.accepted_per_step(), 8.0);
    }

    #[test]
    fn plain_decoding_takes_a_step_a_token() {
        let texts = [text(&[1, 2, 3]), text(&[4]), text(&[])];
        let report = replay(&texts, None, Drafter::None, 16, END);
        assert_eq!(
            (report.texts, report.steps, report.tokens, report.drafted),
            (3, 4, 4, 0)
        );
        assert_eq!(report.tokens_per_step(), 1.0);
        assert!(
            (report.tokens_per_second(1e6) - 1.0).abs() < 0.1,
            "{report:?}"
        );
        assert_eq!(
            replay(&[], None, Drafter::None, 16, END),
            ReplayReport::default()
        );
    }

    #[test]
    fn a_prompt_is_context_and_the_previous_text_a_source() {
        let all: Vec<Token> = (1..9).collect();
        let prompted = ReplayText {
            prompt: vec![50],
            text: all.clone(),
            ..Default::default()
        };
        let report = replay(
            std::slice::from_ref(&prompted),
            None,
            Drafter::default(),
            16,
            END,
        );
        assert_eq!((report.tokens, report.accepted), (9, 0));
        let known = ReplayText {
            previous: all,
            ..prompted
        };
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
        for (target, expected) in [
            ([2, 4, 1], 2),
            ([2, 3, 1], 1),
            ([1, 3, 3], 2),
            ([3, 1, 1], 0),
        ] {
            assert_eq!(accepted(&tree, &target), expected, "{target:?}");
        }
    }
}
