//! One text under way: its part of every step, and what the target says about it.

use std::collections::VecDeque;

use laser_decode::{
    Candidate, DraftTree, Drafter, Draw, Noise, Pool, Source, TargetScores, Verification, Verified, chain_parents,
    verify,
};
use laser_engine::{Allowed, MaskedNode, Scores, Segment, Slot};
use laser_grammar::{GrammarError, Parser};
use laser_model::Tokenizer;
use laser_schema::audit::{Origin, Proposer};
use laser_schema::knowledge::RunnerUp;

use super::constraint::{Constrained, Rule, TreeScores};
use super::draft_model::index_u32;
use super::options::GenerateOptions;
use super::request::{Generated, Request, StopReason, TextError};
use super::source::{Draft, SequenceId};
use super::stop::{cut_at_stop, whole_characters};
use crate::budget::{REACH_MIN, Reach, Terms};
use crate::calibration::Hindsight;

/// From this probability on a token has no runners-up: those of a third of a text's tokens, which would be right once
/// in twenty times at most.
const SURE: f32 = 0.95;

/// The place of a sequence in the engine.
pub(super) struct Room {
    /// Its cache.
    pub(super) slot: Slot,
    /// Tokens of the prompt that the cache holds already, and the sample that they were computed for, if it was one.
    pub(super) cached: usize,
    pub(super) sample: Option<SequenceId>,
    /// Bound on the text's tokens.
    pub(super) max_tokens: usize,
}

/// One text under way.
pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) slot: Slot,
    /// Known tokens that are not cached yet.
    pub(super) pending: VecDeque<u32>,
    /// Bound on this text's tokens: the option's, or what the context length leaves.
    max_tokens: usize,
    /// How its tokens are drawn, after the first one of the prompt.
    draw: Option<Draw>,
    pub(super) done: Generated,
    // This step's segment: a chunk of `pending`, then the tree without its root.
    pub(super) chunk: usize,
    pub(super) draft: Draft,
    tokens: Vec<u32>,
    parents: Vec<u32>,
    /// Tokens of the prompt of which it is still to be told what the target says.
    unscored: usize,
    /// Whether a model had read the tree that is watched.
    watches_read: bool,
    /// The name under which the budget knows what drafts are worth that a model has read.
    worth_read: String,
    /// What it has to follow, if anything, and why it cannot go on.
    constraint: Option<Constrained>,
    failed: Option<GrammarError>,
    /// The node whose allowed tokens the engine is to be asked about, and which these are.
    asked: Option<(usize, Vec<u32>)>,
    // Under a budget: how far it drafts, and what became of a draft.
    reach: Reach,
    pub(super) hindsight: Hindsight,
}

impl Sequence {
    /// A sequence whose cache `room` holds the beginning of the prompt.
    pub(super) fn new(id: SequenceId, request: Request, room: &Room, options: &GenerateOptions) -> Self {
        let pool = request.pool.as_ref().map_or("", Pool::name);
        let worth_read = format!("{pool}+model");
        let noise = Noise::new(request.key).before(request.prompt.len() - 1);
        let aligns = options.alignment > 0 && options.drafter != Drafter::None && !request.plain;
        Self {
            pending: request.prompt[room.cached..].iter().copied().collect(),
            unscored: if aligns { request.prompt.len() - 1 - room.cached } else { 0 },
            request,
            slot: room.slot,
            max_tokens: room.max_tokens,
            draw: options.sampling.map(|sampling| Draw { sampling, noise }),
            done: Generated::default(),
            chunk: 0,
            draft: Draft { id, ..Draft::default() },
            tokens: Vec::new(),
            parents: Vec::new(),
            watches_read: false,
            worth_read,
            constraint: None,
            failed: None,
            asked: None,
            reach: Reach::default(),
            hindsight: Hindsight::default(),
        }
    }

    /// Holds the text to a constraint, from its first token on: what it is forced to begin with follows the prompt.
    pub(super) fn constrain(&mut self, parser: Parser, options: &GenerateOptions) -> Result<(), TextError> {
        let constraint = self.constraint.insert(Constrained::new(parser, options.end_of_drafts()));
        let begun = constraint.begin(self.max_tokens - 1)?;
        self.done.forced += begun.len() as u64;
        self.done.origins.extend(begun.iter().map(|_| Origin::CONSTRAINT));
        self.pending.extend(&begun);
        self.done.tokens.extend(begun);
        Ok(())
    }

    /// What held it to its constraint.
    pub(super) fn take_parser(&mut self) -> Option<Parser> {
        self.constraint.take().map(Constrained::into_parser)
    }

    /// Cuts what the constraint does not allow out of the draft. Lookahead's window stays whole: what the target says
    /// there makes n-grams, and verification takes none of it that is not allowed.
    pub(super) fn cut_forbidden(&mut self, drafter: Drafter) {
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !matches!(drafter, Drafter::Lookahead { .. })) {
            self.failed = constraint.cut(&mut self.draft.tree).err();
        }
    }

    /// Begins to look at a step's scores.
    pub(super) fn begin_scores(&mut self) {
        self.constraint.iter_mut().for_each(Constrained::begin_step);
    }

    /// Finds out what the target says of allowed tokens, as far as that takes no mask.
    pub(super) fn look_at(&mut self, scores: &Scores, options: &GenerateOptions) {
        let is_scored = self.is_scored();
        let rule = self.rule(options);
        if let Some(constraint) = self.constraint.as_mut().filter(|_| is_scored && self.failed.is_none()) {
            let scores = TreeScores { scores, root: self.chunk - 1, told: None };
            match constraint.advance(&self.draft.tree, &scores, rule) {
                Ok(asked) => self.asked = asked,
                Err(error) => self.failed = Some(error),
            }
        }
    }

    /// What the engine is to be asked.
    pub(super) fn masked_node(&self) -> Option<MaskedNode<'_>> {
        let (node, mask) = self.asked.as_ref()?;
        let place = self.place() + self.draft.tree.depths().get(*node).map_or(0, |depth| *depth as usize);
        let draw = self.draw.map(|draw| draw.after(place));
        Some(MaskedNode { slot: self.slot, node: self.chunk - 1 + node, mask, draw })
    }

    /// Takes over the engine's answer.
    pub(super) fn answer(&mut self, allowed: Allowed, scores: &Scores) {
        if let (Some((node, _)), Some(constraint)) = (self.asked.take(), &mut self.constraint) {
            constraint.answer(allowed, scores.prediction(self.chunk - 1 + node));
        }
    }

    fn rule(&self, options: &GenerateOptions) -> Rule {
        let policy =
            if self.request.plain || self.request.strict { Verification::Strict } else { options.verification };
        let truncates = self.draw.is_some_and(|draw| draw.sampling.top_k().is_some() || draw.sampling.top_p() < 1.0);
        Rule { policy, is_drawn: self.draw.is_some(), truncates }
    }

    /// The place of the last token that is known.
    fn place(&self) -> usize {
        self.request.prompt.len() - 1 + self.done.tokens.len()
    }

    /// Its part of this step.
    pub(super) fn segment(&self) -> Segment<'_> {
        let scored_from = match self.is_scored() {
            _ if self.unscored > 0 => 0,
            true => self.chunk - 1,
            false => self.tokens.len(),
        };
        Segment {
            slot: self.slot,
            tokens: &self.tokens,
            parents: &self.parents,
            scored_from,
            draw: self.draw,
            ..Segment::default()
        }
    }

    /// Whether it is still to feed more of its prompt than the token after which the next one comes.
    pub(super) fn is_prompt(&self) -> bool {
        self.done.step_accepted.is_empty() && self.pending.len() > 1
    }

    /// Whether it continues the same prompt.
    pub(super) fn is_of_prompt(&self, request: &Request) -> bool {
        self.request.prompt == request.prompt
    }

    /// Begins a step with at most `most` of its pending tokens; returns how many that are.
    pub(super) fn feed(&mut self, most: usize) -> usize {
        self.chunk = self.pending.len().min(most);
        self.tokens.clear();
        self.tokens.extend(self.pending.iter().take(self.chunk));
        self.parents.clear();
        self.parents.extend(chain_parents(self.chunk));
        self.draft.tree.clear();
        (self.draft.seconds, self.draft.rationed, self.draft.is_read) = (0.0, 0.0, false);
        self.chunk
    }

    /// Whether this step tells its next token.
    pub(super) fn is_scored(&self) -> bool {
        self.chunk == self.pending.len()
    }

    /// A draft of at most `nodes` nodes below the last pending token; `adapts` if a budget is going to cut it.
    pub(super) fn begin_draft(&mut self, nodes: usize, adapts: bool) -> &mut Draft {
        let place = self.place();
        let left = self.max_tokens - self.done.tokens.len();
        // The token after the tree's last is the target's own: no more than that can be of use.
        let useful = nodes.min(left - 1);
        let draft = &mut self.draft;
        draft.reach = if adapts { self.reach.next(useful) } else { useful };
        draft.nodes = if adapts { draft.reach.max(REACH_MIN).min(useful) } else { useful };
        draft.left = left;
        draft.noise = self.draw.map(|draw| draw.after(place).noise);
        self.pending.back().into_iter().for_each(|&root| draft.tree.reset(root));
        draft
    }

    /// Watches what becomes of its draft.
    pub(super) fn watch(&mut self) {
        if self.hindsight.watch(&self.draft.tree, self.done.tokens.len()) {
            self.watches_read = self.draft.is_read;
        }
    }

    /// The name under which the budget knows what this step's draft is worth.
    pub(super) fn worth(&self) -> &str {
        self.worth_of(self.draft.is_read)
    }

    /// That of the draft which is watched, or was until now.
    pub(super) fn watched_worth(&self) -> &str {
        self.worth_of(self.watches_read)
    }

    /// Drafts are worth what those of their pool are, and others if a draft model has read them.
    fn worth_of(&self, is_read: bool) -> &str {
        if is_read { &self.worth_read } else { self.request.pool.as_ref().map_or("", Pool::name) }
    }

    /// Keeps the first nodes of the tree; how many that are tells how far and when it drafts next, under its terms.
    pub(super) fn cut(&mut self, kept: usize, terms: Terms) {
        if self.draft.tree.drafted() > 0 {
            self.reach.learn(kept, terms);
        }
        self.draft.tree.truncate(kept);
    }

    /// Puts what is left of the tree behind the chunk.
    pub(super) fn attach_tree(&mut self) {
        self.done.draft_seconds += self.draft.seconds;
        if self.draft.tree.drafted() == 0 {
            return;
        }
        let root = self.chunk - 1;
        self.tokens.extend(&self.draft.tree.tokens()[1..]);
        self.parents.extend(self.draft.tree.parents()[1..].iter().map(|p| p + index_u32(root)));
        self.done.drafted += self.draft.tree.drafted() as u64;
    }

    /// Takes over what the target says about this step's segment: the nodes to keep in the cache, and
    /// why the text has ended if it has.
    pub(super) fn accept(
        &mut self,
        scores: &Scores,
        options: &GenerateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<usize>, Option<StopReason>), TextError> {
        let mut keep: Vec<usize> = (0..self.chunk).collect();
        self.unscored = self.unscored.saturating_sub(self.chunk);
        if !self.is_scored() {
            self.pending.drain(..self.chunk);
            return Ok((keep, None));
        }
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let root = self.chunk - 1;
        let told = self.constraint.as_mut().map(|constraint| std::mem::take(&mut constraint.told));
        let scores = TreeScores { scores, root, told: told.as_deref() };
        let Rule { policy, .. } = self.rule(options);
        let step = verify(&self.draft.tree, &scores, policy, &options.end_of_text);
        keep.extend(step.path.iter().map(|node| root + node));
        let parents = std::iter::once(0).chain(step.path.iter().copied());
        for (parent, place) in parents.zip(self.done.tokens.len()..) {
            let prediction = scores.prediction(parent);
            let of_any = |token| token == prediction.choice.token || policy.relaxes(Source::Pool);
            let accepted = policy.accepted(scores.top(parent), prediction);
            self.hindsight.accepted(place, accepted.map(|candidate| (candidate.token, of_any(candidate.token))));
        }
        let mut stop = None;
        let (mut emitted, from) = (0, self.done.tokens.len());
        let nodes = std::iter::once(0).chain(step.path.iter().copied());
        for ((&token, &log_probability), node) in step.tokens.iter().zip(&step.log_probabilities).zip(nodes) {
            if log_probability.is_nan() {
                return Err(TextError::NotANumber);
            }
            emitted += 1;
            self.keep_runners_up((token, log_probability), scores.top(node));
            self.done.tokens.push(token);
            self.done.log_probability += f64::from(log_probability);
            stop = self.stop_after(token, options, tokenizer)?;
            if stop.is_some() {
                break;
            }
        }
        let accepted = step.path.len().min(emitted);
        self.done.step_accepted.push(index_u32(accepted));
        for &node in &step.path[..accepted] {
            let relaxed = !is_choice(&self.draft.tree, &scores, node);
            self.done.relaxed += u64::from(relaxed);
            let source = proposer(self.draft.tree.sources()[node]);
            self.done.origins.push(Origin { source, relaxed });
        }
        if emitted > accepted {
            self.done.origins.push(Origin::TARGET);
        }
        let stop = self.force(&step, stop, options, tokenizer)?;
        let new = &self.done.tokens[from..];
        self.pending.clear();
        self.pending.extend(&new[emitted.saturating_sub(1)..]);
        Ok((keep, stop))
    }

    /// Keeps the most probable tokens of the next place beside the one that is written there, if it was a race.
    fn keep_runners_up(&mut self, (token, log_probability): (u32, f32), top: &[Candidate]) {
        let (most, probability) = (self.request.runners_up, log_probability.exp());
        if most == 0 || probability >= SURE {
            return;
        }
        let place = index_u32(self.done.tokens.len());
        let others = top.iter().filter(|other| other.token != token).take(most);
        let others = others.map(|other| (other.token, other.log_probability.exp()));
        let race = std::iter::once((token, probability)).chain(others);
        self.done.runners_up.extend(race.map(|(token, probability)| RunnerUp { place, token, probability }));
    }

    /// Goes on with what the constraint forces after a step, and holds the text to an end that it allows.
    fn force(
        &mut self,
        step: &Verified,
        mut stop: Option<StopReason>,
        options: &GenerateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Option<StopReason>, TextError> {
        let Some(constraint) = self.constraint.as_mut().filter(|_| stop != Some(StopReason::End)) else {
            return Ok(stop);
        };
        constraint.settle(&self.draft.tree, &step.path, step.tokens.get(step.path.len()).copied())?;
        while stop.is_none()
            && let Some(token) = self.constraint.as_mut().map_or(Ok(None), Constrained::forced)?
        {
            self.done.tokens.push(token);
            self.done.origins.push(Origin::CONSTRAINT);
            self.done.forced += 1;
            stop = self.stop_after(token, options, tokenizer)?;
        }
        if stop == Some(StopReason::Length) && !self.constraint.as_mut().map_or(Ok(true), Constrained::may_end)? {
            return Err(TextError::CutOff { tokens: self.done.tokens.len() });
        }
        Ok(stop)
    }

    /// Whether the text ends with the token just added, and if so its text.
    fn stop_after(
        &mut self,
        token: u32,
        options: &GenerateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Option<StopReason>, TextError> {
        let tokens = &self.done.tokens;
        if options.end_of_text.contains(&token) {
            self.done.text = tokenizer.decode(&tokens[..tokens.len() - 1])?;
            return Ok(Some(StopReason::End));
        }
        if let Some(text) = cut_at_stop(tokens, &options.stop, tokenizer)? {
            self.done.text = text;
            return Ok(Some(StopReason::Stop));
        }
        if tokens.len() == self.max_tokens {
            self.done.text = whole_characters(tokenizer.decode(tokens)?);
            return Ok(Some(StopReason::Length));
        }
        Ok(None)
    }
}

fn proposer(source: Source) -> Proposer {
    match source {
        Source::Pool => Proposer::Pool,
        Source::Previous => Proposer::Previous,
        Source::Context | Source::Prompt => Proposer::Context,
        Source::Model => Proposer::DraftModel,
    }
}

fn is_choice(tree: &DraftTree, scores: &impl TargetScores, node: usize) -> bool {
    let parent = tree.parents()[node] as usize;
    scores.prediction(parent).choice.token == tree.tokens()[node]
}
