//! The generation loop: continuous batching of draft, forward, verify, commit.
//!
//! Sequences join and leave at every step. What a sequence feeds into a step is always the same shape:
//! its *pending* tokens, which are known but not yet cached (a chunk of its prompt, later the last
//! token it emitted), and below the last of them a draft tree. So the prompt's last chunk already
//! carries a draft, and prefill needs no path of its own.
//!
//! Guarantees: with [`Verification::Strict`] every text equals plain greedy decoding, whatever the
//! drafter, the tree and the batch, up to rounding in the engine's forward. An engine error costs the
//! sequences of the batch their progress: each starts over alone, and the one that then fails is
//! reported. Nothing of one text is visible to the next.

use std::collections::VecDeque;
use std::time::Instant;

use laser_decode::{
    Candidate, DraftContext, DraftTree, Drafter, Pool, ROOT_PARENT, Source, TargetScores, Verification, verify,
};
use laser_model::{ModelError, Tokenizer};
use laser_schema::audit::{Origin, Proposer};

use crate::budget::{Budget, Drafted, Reach, Terms};
use crate::calibration::Hindsight;
use crate::cost::StepLoad;
use crate::engine::{Engine, EngineError, Scores, Segment, Slot};

/// Prompts that begin alike for fewer tokens than this are prefilled apart: a fork costs about as much
/// as a forward of a few tokens.
const SHARED_PREFIX_MIN: usize = 16;

/// Prefixes kept for forking; one a template and pool is what a run needs.
const SHARED_PREFIXES_MAX: usize = 4;

/// Sequences that fail by themselves, without a text between them, before the engine itself is given up.
pub(crate) const FAILURES_IN_A_ROW_MAX: usize = 8;

/// How texts are generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// What drafts.
    pub drafter: Drafter,
    /// Drafted tokens of a sequence and step, at most.
    pub nodes: usize,
    /// What is accepted.
    pub verification: Verification,
    /// Sequences of a step, at most; at least 1.
    pub batch: usize,
    /// Cuts trees back to the nodes that pay. `None` drafts `nodes` always, so that relaxed texts, too, depend on
    /// the entity alone and not on measured times.
    pub budget: Option<Budget>,
    /// Tokens of a step, at most; at least 1. Longer prompts are prefilled in chunks.
    pub step_tokens: usize,
    /// Bound on a text's tokens, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a text; the first is the pools'.
    pub end_of_text: Vec<u32>,
    /// Strings that end a text; they are not part of it.
    pub stop: Vec<String>,
    /// Whether a prompt begins from the cache of the prefix that it shares with others; a benchmark measures what that
    /// gives.
    pub shared_prefixes: bool,
}

/// One text to be generated.
#[derive(Debug, Clone)]
pub struct Request {
    /// The caller's name for it.
    pub id: u64,
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The tokens of the entity's previous text; empty if there is none.
    pub previous: Vec<u32>,
    /// The pool to draft from.
    pub pool: Option<Pool>,
    /// Without speculation: greedy decoding, one token a forward.
    pub plain: bool,
    /// Only what plain greedy decoding gives is accepted, whatever the options say.
    pub strict: bool,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StopReason {
    /// With an end-of-text token.
    End,
    /// With a stop string.
    Stop,
    /// At the bound on tokens or at the model's context length.
    #[default]
    Length,
}

impl StopReason {
    /// `end`, `stop` or `length`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::End => "end",
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A generated text and what it cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generated {
    /// The text, without end-of-text token and stop string.
    pub text: String,
    /// Its tokens, with the end-of-text token if it ended by one.
    pub tokens: Vec<u32>,
    /// Where each of them comes from.
    pub origins: Vec<Origin>,
    /// Why it ended.
    pub stop: StopReason,
    /// Drafted tokens.
    pub drafted: u64,
    /// Accepted tokens that are not the argmax.
    pub relaxed: u64,
    /// Accepted draft tokens of each forward that emitted tokens.
    pub step_accepted: Vec<u32>,
    /// Sum of the natural-log probabilities of the tokens under the target.
    pub log_probability: f64,
    /// Seconds spent drafting.
    pub draft_seconds: f64,
    /// Its even share of the duration of every step it was part of, seconds.
    pub engine_seconds: f64,
}

/// The end of one request.
#[derive(Debug)]
pub struct Finished {
    /// [`Request::id`].
    pub id: u64,
    /// The text, or why there is none.
    pub result: Result<Generated, String>,
}

/// Why the loop cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Sequence after sequence failed, each by itself, and none succeeded.
    #[error("the engine failed for {FAILURES_IN_A_ROW_MAX} sequences in a row; the last time: {0}")]
    Engine(EngineError),
}

/// What turns requests into texts, a batch at a time: all that the worker's life needs to know of an engine.
pub trait TextGenerator: Send {
    /// The tokenizer of texts and prompts.
    fn tokenizer(&self) -> &Tokenizer;

    /// Requests that are worked on at once, at most.
    fn batch(&self) -> usize;

    /// Requests that have not ended.
    fn load(&self) -> usize;

    /// Adds a request; it joins the batch as soon as there is room.
    fn submit(&mut self, request: Request);

    /// Computes what `prompts` have in common at their start once instead of for each of them, where that
    /// is possible.
    ///
    /// # Errors
    /// The engine's, from the forward over the prefix; the requests themselves are not affected.
    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError>;

    /// Goes on with the batch. Returns the requests that ended with it.
    ///
    /// # Errors
    /// [`GenerateError`] when nothing more can be expected of the engine.
    fn step(&mut self) -> Result<Vec<Finished>, GenerateError>;

    /// Drops every request and cache; the engine is as new.
    fn reset(&mut self);
}

impl<G: TextGenerator + ?Sized> TextGenerator for Box<G> {
    fn tokenizer(&self) -> &Tokenizer {
        (**self).tokenizer()
    }

    fn batch(&self) -> usize {
        (**self).batch()
    }

    fn load(&self) -> usize {
        (**self).load()
    }

    fn submit(&mut self, request: Request) {
        (**self).submit(request);
    }

    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError> {
        (**self).share_prefix(prompts)
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        (**self).step()
    }

    fn reset(&mut self) {
        (**self).reset();
    }
}

/// Why one text cannot go on, whatever the others do.
#[derive(Debug, thiserror::Error)]
enum SequenceError {
    /// The tokenizer refused the model's own tokens.
    #[error(transparent)]
    Tokenizer(#[from] ModelError),
    /// The forward overflowed.
    #[error("the model's probabilities are not numbers; try a dtype of more range")]
    NotANumber,
}

struct Sequence {
    request: Request,
    slot: Slot,
    context: DraftContext,
    /// Known tokens that are not cached yet.
    pending: VecDeque<u32>,
    /// Bound on this text's tokens: the option's, or what the context length leaves.
    max_tokens: usize,
    done: Generated,
    // This step's segment: a chunk of `pending`, then the tree without its root.
    chunk: usize,
    tree: DraftTree,
    tokens: Vec<u32>,
    parents: Vec<u32>,
    // Under a budget: how far it drafts, and what became of a draft.
    reach: Reach,
    hindsight: Hindsight,
}

/// Scores of a segment as seen from its tree: the root is the last token of the chunk.
struct TreeScores<'a> {
    scores: &'a Scores,
    root: usize,
}

impl TargetScores for TreeScores<'_> {
    fn top(&self, node: usize) -> &[Candidate] {
        self.scores.top(self.root + node)
    }
}

/// Generates texts for requests with one engine. Memory: `batch` caches plus the pending requests.
pub struct Generator {
    engine: Box<dyn Engine>,
    tokenizer: Tokenizer,
    options: GenerateOptions,
    queue: VecDeque<Request>,
    /// Requests whose step failed: each runs alone, so that the one at fault is found.
    suspects: VecDeque<Request>,
    /// The batch is one suspect.
    quarantine: bool,
    active: Vec<Sequence>,
    prefixes: VecDeque<(Vec<u32>, Slot)>,
    failures_in_a_row: usize,
    /// Duration of prefills of shared prefixes, added to the next step.
    unattributed_seconds: f64,
}

impl std::fmt::Debug for Generator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator")
            .field("options", &self.options)
            .field("active", &self.active.len())
            .field("queued", &self.queue.len())
            .finish_non_exhaustive()
    }
}

impl Generator {
    /// A generator without requests.
    pub fn new(engine: Box<dyn Engine>, tokenizer: Tokenizer, options: GenerateOptions) -> Self {
        Self {
            engine,
            tokenizer,
            options,
            queue: VecDeque::new(),
            suspects: VecDeque::new(),
            quarantine: false,
            active: Vec::new(),
            prefixes: VecDeque::new(),
            failures_in_a_row: 0,
            unattributed_seconds: 0.0,
        }
    }

    /// The model.
    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    /// How texts are generated.
    pub fn options(&self) -> &GenerateOptions {
        &self.options
    }

    /// Generates differently from the next step on; sequences that are under way keep their drafter. `options` gets
    /// what was in force, so that a later swap goes on with its budget where that stood.
    pub fn swap_options(&mut self, options: &mut GenerateOptions) {
        std::mem::swap(&mut self.options, options);
    }

    fn prefill_prefix(&mut self, slot: Slot, prefix: &[u32]) -> Result<(), EngineError> {
        for chunk in prefix.chunks(self.options.step_tokens.max(1)) {
            let parents: Vec<u32> = chain_parents(chunk.len()).collect();
            let segment = Segment { slot, tokens: chunk, parents: &parents, scored_from: chunk.len() };
            self.engine.step(&[segment], self.options.verification.top_k())?;
            self.engine.commit(slot, &(0..chunk.len()).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Lets requests join while there is room. A suspect joins only an empty batch, and nobody joins it.
    fn admit(&mut self, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        if self.active.is_empty() {
            self.quarantine = !self.suspects.is_empty();
        }
        let room = if self.quarantine { 1 } else { self.options.batch };
        while self.active.len() < room
            && let Some(request) = self.waiting().pop_front()
        {
            let max_tokens = match self.check(&request) {
                Ok(max_tokens) => max_tokens,
                Err(reason) => {
                    finished.push(Finished { id: request.id, result: Err(reason) });
                    continue;
                }
            };
            match self.open(&request, max_tokens) {
                Ok((slot, cached)) => {
                    let sequence = self.sequence(request, slot, cached, max_tokens);
                    self.active.push(sequence);
                }
                Err(error) if self.active.is_empty() => self.fail(&request, error, finished)?,
                Err(error) => {
                    tracing::debug!(%error, "no cache until a sequence ends");
                    self.waiting().push_front(request);
                    break;
                }
            }
        }
        Ok(())
    }

    /// The engine failed for a request that had it to itself.
    fn fail(
        &mut self,
        request: &Request,
        error: EngineError,
        finished: &mut Vec<Finished>,
    ) -> Result<(), GenerateError> {
        finished.push(Finished { id: request.id, result: Err(format!("engine: {error}")) });
        self.failures_in_a_row += 1;
        match self.failures_in_a_row {
            FAILURES_IN_A_ROW_MAX.. => Err(GenerateError::Engine(error)),
            _ => Ok(()),
        }
    }

    /// The requests whose turn it is.
    fn waiting(&mut self) -> &mut VecDeque<Request> {
        if self.quarantine { &mut self.suspects } else { &mut self.queue }
    }

    /// The bound on the request's text, or why there can be none.
    fn check(&self, request: &Request) -> Result<usize, String> {
        let (length, limit) = (request.prompt.len(), self.engine.info().max_positions);
        if length == 0 {
            return Err("the prompt is empty".to_owned());
        }
        if length >= limit {
            return Err(format!(
                "the prompt has {length} tokens, but the model's context is {limit}; lower [prompt] max_tokens"
            ));
        }
        Ok(self.options.max_new_tokens.min(limit - length))
    }

    /// A cache for the request, and how many tokens of its prompt it holds already.
    fn open(&mut self, request: &Request, max_tokens: usize) -> Result<(Slot, usize), EngineError> {
        let length = request.prompt.len();
        let capacity = length + max_tokens + self.options.nodes;
        let fits = |prefix: &[u32]| {
            let shares = self.options.shared_prefixes && prefix.len() < length;
            shares && request.prompt.starts_with(prefix)
        };
        let shared = self.prefixes.iter().filter(|(prefix, _)| fits(prefix));
        match shared.max_by_key(|(prefix, _)| prefix.len()) {
            Some((prefix, from)) => Ok((self.engine.fork(*from, prefix.len(), capacity)?, prefix.len())),
            None => Ok((self.engine.open(capacity)?, 0)),
        }
    }

    fn sequence(&self, request: Request, slot: Slot, cached: usize, max_tokens: usize) -> Sequence {
        let drafter = if request.plain { Drafter::None } else { self.options.drafter };
        let end = self.options.end_of_text.first().copied().unwrap_or(u32::MAX);
        let mut context = DraftContext::new(drafter, request.pool.clone(), end);
        // A tokenizer may know more tokens than the model, whose engine refuses those.
        let known = |token: &&u32| (**token as usize) < self.engine.info().vocab_size;
        let previous: Vec<u32> = request.previous.iter().take_while(known).copied().collect();
        if !previous.is_empty() {
            context.add_previous(&previous);
        }
        context.extend(&request.prompt);
        Sequence {
            pending: request.prompt[cached..].iter().copied().collect(),
            request,
            slot,
            context,
            max_tokens,
            done: Generated::default(),
            chunk: 0,
            tree: DraftTree::new(),
            tokens: Vec::new(),
            parents: Vec::new(),
            reach: Reach::default(),
            hindsight: Hindsight::default(),
        }
    }

    /// Fills the sequences' segments. Those that are generating come first and share the step's tokens
    /// evenly, so that no tree starves another; what they leave goes to prompts, oldest first. Returns
    /// the indexes of those that take part.
    fn prepare(&mut self) -> Vec<usize> {
        let mut left = self.options.step_tokens.max(1);
        let is_prompt = |&i: &usize| self.active[i].pending.len() > 1;
        let (prompts, generating): (Vec<usize>, Vec<usize>) = (0..self.active.len()).partition(is_prompt);
        let sharers = (1..=generating.len()).rev().chain(std::iter::repeat(1));
        let mut part = Vec::with_capacity(self.active.len());
        for (index, sharers) in generating.into_iter().chain(prompts).zip(sharers) {
            if left == 0 {
                break;
            }
            let budget = self.options.budget.as_mut();
            self.active[index].draft(left.div_ceil(sharers), self.options.nodes, budget);
            left -= self.active[index].chunk + self.active[index].drafted();
            part.push(index);
        }
        part.sort_unstable();
        self.budget(&part);
        part.iter().for_each(|&index| self.active[index].attach_tree());
        part
    }

    /// Cuts the trees back to the nodes that pay, over the whole batch. A tree's nodes come in falling probability, so
    /// what is left of it is its beginning.
    fn budget(&mut self, part: &[usize]) {
        let Some(budget) = &mut self.options.budget else {
            return;
        };
        let (mut known, mut certain) = (StepLoad::default(), 0);
        let mut drafted = Vec::with_capacity(part.len());
        for &index in part {
            let sequence = &self.active[index];
            let cached = self.engine.cached(sequence.slot);
            known = known.with(sequence.chunk, cached);
            certain += usize::from(sequence.chunk == sequence.pending.len());
            drafted.push(Drafted {
                pool: sequence.pool(),
                cached,
                probabilities: sequence.tree.probabilities().get(1..).unwrap_or_default(),
            });
        }
        let kept = budget.allot((known, certain), &drafted);
        for (&index, kept) in part.iter().zip(kept) {
            let sequence = &mut self.active[index];
            let terms = budget.terms(sequence.pool(), part.len());
            sequence.cut(kept, terms);
        }
    }

    fn forward(&mut self, part: &[usize]) -> Result<Vec<Scores>, EngineError> {
        let segments: Vec<Segment<'_>> = part.iter().map(|&i| self.active[i].segment()).collect();
        self.engine.step(&segments, self.options.verification.top_k())
    }

    fn attribute(&mut self, part: &[usize], seconds: f64) {
        let share = seconds / part.len() as f64;
        for &index in part {
            self.active[index].done.engine_seconds += share;
        }
    }

    /// Takes over the scores of a step, whose forward took `seconds`. On an error what had ended before it is finished
    /// all the same.
    fn advance(
        &mut self,
        part: &[usize],
        (scores, seconds): (&[Scores], f64),
        finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        let mut outcome = Ok(());
        for (&index, scores) in part.iter().zip(scores) {
            let sequence = &mut self.active[index];
            match sequence.accept(scores, &self.options, &self.tokenizer) {
                Ok((keep, None)) => outcome = self.engine.commit(sequence.slot, &keep),
                Ok((_, Some(stop))) => ended.push((index, Ok(stop))),
                Err(error) => ended.push((index, Err(error.to_string()))),
            }
            if let Some(budget) = &mut self.options.budget {
                let has_ended = ended.last().is_some_and(|(last, _)| *last == index);
                let judged = sequence.hindsight.judge(&sequence.done.tokens, has_ended);
                budget.judge(sequence.pool(), &judged);
            }
            if outcome.is_err() {
                break;
            }
        }
        if let Some(budget) = &mut self.options.budget {
            budget.learn(seconds);
        }
        for (index, stop) in ended.into_iter().rev() {
            let Sequence { request, slot, done, .. } = self.active.remove(index);
            self.engine.close(slot);
            if stop.is_ok() {
                self.failures_in_a_row = 0;
            }
            let result = stop.map(|stop| Generated { stop, ..done });
            finished.push(Finished { id: request.id, result });
        }
        outcome
    }

    /// After a failed step every sequence starts over, each alone; one that then fails is at fault.
    fn isolate(&mut self, error: EngineError, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let requests: Vec<Request> = std::mem::take(&mut self.active)
            .into_iter()
            .map(|sequence| {
                self.engine.close(sequence.slot);
                sequence.request
            })
            .collect();
        match requests.as_slice() {
            [suspect] if self.quarantine => self.fail(suspect, error, finished),
            _ => {
                self.suspects.extend(requests);
                Ok(())
            }
        }
    }
}

impl TextGenerator for Generator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn batch(&self) -> usize {
        self.options.batch
    }

    fn load(&self) -> usize {
        self.active.len() + self.queue.len() + self.suspects.len()
    }

    fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError> {
        let Some((first, rest)) = prompts.split_first() else {
            return Ok(());
        };
        let common = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let length = rest.iter().map(|p| common(first, p)).min().unwrap_or_default();
        let prefix = &first[..length];
        if length < SHARED_PREFIX_MIN || self.prefixes.iter().any(|(p, _)| p.as_slice() == prefix) {
            return Ok(());
        }
        let start = Instant::now();
        if self.prefixes.len() == SHARED_PREFIXES_MAX
            && let Some((_, oldest)) = self.prefixes.pop_front()
        {
            self.engine.close(oldest);
        }
        let slot = self.engine.open(prefix.len())?;
        // Known to `reset` before the forward, which may panic.
        self.prefixes.push_back((prefix.to_vec(), slot));
        if let Err(error) = self.prefill_prefix(slot, prefix) {
            self.prefixes.pop_back();
            self.engine.close(slot);
            return Err(error);
        }
        self.unattributed_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        let start = Instant::now();
        let mut finished = Vec::new();
        self.admit(&mut finished)?;
        if self.active.is_empty() {
            return Ok(finished);
        }
        let part = self.prepare();
        let forward = Instant::now();
        let outcome = self.forward(&part).and_then(|scores| {
            let forward = forward.elapsed().as_secs_f64();
            let seconds = start.elapsed().as_secs_f64() + self.unattributed_seconds;
            self.unattributed_seconds = 0.0;
            self.attribute(&part, seconds);
            self.advance(&part, (&scores, forward), &mut finished)
        });
        if let Err(error) = outcome {
            self.isolate(error, &mut finished)?;
        }
        Ok(finished)
    }

    fn reset(&mut self) {
        self.queue.clear();
        self.suspects.clear();
        self.failures_in_a_row = 0;
        self.unattributed_seconds = 0.0;
        let slots = self.active.drain(..).map(|s| s.slot);
        for slot in slots.chain(self.prefixes.drain(..).map(|(_, slot)| slot)) {
            self.engine.close(slot);
        }
    }
}

/// Each node's parent is the one before it, the first one's [`ROOT_PARENT`].
fn chain_parents(length: usize) -> impl Iterator<Item = u32> {
    (0..length).map(|i| index_u32(i).wrapping_sub(1))
}

/// Node indexes fit u32: a step's tokens are bounded far below.
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(ROOT_PARENT)
}

impl Sequence {
    fn segment(&self) -> Segment<'_> {
        let scored_from = if self.chunk == self.pending.len() { self.chunk - 1 } else { self.tokens.len() };
        Segment { slot: self.slot, tokens: &self.tokens, parents: &self.parents, scored_from }
    }

    /// A chunk of at most `left` pending tokens and, if that is all of them, a tree below the last one.
    fn draft(&mut self, left: usize, nodes: usize, budget: Option<&mut Budget>) {
        self.chunk = self.pending.len().min(left);
        self.tokens.clear();
        self.tokens.extend(self.pending.iter().take(self.chunk));
        self.parents.clear();
        self.parents.extend(chain_parents(self.chunk));
        self.tree.clear();
        if self.chunk < self.pending.len() {
            return;
        }
        let start = Instant::now();
        // The token after the tree's last is the target's own: no more than that can be of use.
        let useful = self.max_tokens - self.done.tokens.len() - 1;
        let most = nodes.min(useful).min(left - self.chunk);
        let most = match &budget {
            Some(_) => self.reach.next(most),
            None => most,
        };
        self.context.draft(most, &mut self.tree);
        let seconds = start.elapsed().as_secs_f64();
        self.done.draft_seconds += seconds;
        if let Some(budget) = budget.filter(|_| most > 0) {
            budget.drafted(seconds, self.drafted());
            self.hindsight.watch(&self.tree, self.done.tokens.len());
        }
    }

    /// The name of the pool that it drafts from; empty without one.
    fn pool(&self) -> &str {
        self.request.pool.as_ref().map_or("", Pool::name)
    }

    /// Keeps the first nodes of the tree; how many that are tells how far and when it drafts next, under its terms.
    fn cut(&mut self, kept: usize, terms: Terms) {
        if self.drafted() > 0 {
            self.reach.learn(kept, terms);
        }
        self.tree.truncate(kept);
    }

    /// Drafted nodes of this step.
    fn drafted(&self) -> usize {
        self.tree.len().saturating_sub(1)
    }

    /// Puts what is left of the tree behind the chunk.
    fn attach_tree(&mut self) {
        if self.drafted() == 0 {
            return;
        }
        let root = self.chunk - 1;
        self.tokens.extend(&self.tree.tokens()[1..]);
        self.parents.extend(self.tree.parents()[1..].iter().map(|p| p + index_u32(root)));
        self.done.drafted += self.tree.drafted() as u64;
    }

    /// Takes over what the target says about this step's segment: the nodes to keep in the cache, and
    /// why the text has ended if it has.
    fn accept(
        &mut self,
        scores: &Scores,
        options: &GenerateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<usize>, Option<StopReason>), SequenceError> {
        let mut keep: Vec<usize> = (0..self.chunk).collect();
        if self.chunk < self.pending.len() {
            self.pending.drain(..self.chunk);
            return Ok((keep, None));
        }
        let root = self.chunk - 1;
        let scores = TreeScores { scores, root };
        let policy =
            if self.request.plain || self.request.strict { Verification::Strict } else { options.verification };
        let step = verify(&self.tree, &scores, policy, &options.end_of_text);
        keep.extend(step.path.iter().map(|node| root + node));
        let parents = std::iter::once(0).chain(step.path.iter().copied());
        for (parent, place) in parents.zip(self.done.tokens.len()..) {
            let accepted = policy.accepted(scores.top(parent));
            self.hindsight.accepted(place, accepted.map(|(_, candidate)| candidate.token));
        }
        let mut stop = None;
        let mut emitted = 0;
        for (&token, &log_probability) in step.tokens.iter().zip(&step.log_probabilities) {
            if log_probability.is_nan() {
                return Err(SequenceError::NotANumber);
            }
            emitted += 1;
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
            let relaxed = !is_argmax(&self.tree, &scores, node);
            self.done.relaxed += u64::from(relaxed);
            let source = proposer(self.tree.sources()[node]);
            self.done.origins.push(Origin { source, relaxed });
        }
        if emitted > accepted {
            self.done.origins.push(Origin::TARGET);
        }
        self.context.extend(&step.tokens[..emitted]);
        self.pending.clear();
        self.pending.extend(step.tokens[..emitted].last());
        Ok((keep, stop))
    }

    /// Whether the text ends with the token just added, and if so its text.
    fn stop_after(
        &mut self,
        token: u32,
        options: &GenerateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Option<StopReason>, ModelError> {
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
            self.done.text = tokenizer.decode(tokens)?;
            return Ok(Some(StopReason::Length));
        }
        Ok(None)
    }
}

fn proposer(source: Source) -> Proposer {
    match source {
        Source::Pool => Proposer::Pool,
        Source::Previous => Proposer::Previous,
        Source::Context => Proposer::Context,
    }
}

fn is_argmax(tree: &DraftTree, scores: &TreeScores<'_>, node: usize) -> bool {
    let parent = tree.parents()[node] as usize;
    scores.top(parent).first().is_some_and(|c| c.token == tree.tokens()[node])
}

/// The text before a stop string, if the last token completes one. A stop string of n bytes ends within the
/// last n tokens, and a few more keep characters of several bytes whole.
pub(crate) fn cut_at_stop(
    tokens: &[u32],
    stop: &[String],
    tokenizer: &Tokenizer,
) -> Result<Option<String>, ModelError> {
    let Some(longest) = stop.iter().map(String::len).max() else {
        return Ok(None);
    };
    let tail = tokenizer.decode(&tokens[tokens.len().saturating_sub(longest + 4)..])?;
    if !stop.iter().any(|s| tail.contains(s.as_str())) {
        return Ok(None);
    }
    let text = tokenizer.decode(tokens)?;
    let cut = stop.iter().filter_map(|s| text.find(s.as_str())).min();
    Ok(cut.map(|cut| text[..cut].to_owned()))
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn a_stop_string_is_found_at_the_token_that_completes_it() {
        let model = std::path::absolute("../fixtures/profile-lm").unwrap();
        let tokenizer = Tokenizer::open(&model.join("tokenizer.json")).unwrap();
        let text = "Likes 電影 and café noir – a lot.\n\nUser: 2";
        let tokens = tokenizer.encode(text, false).unwrap();
        let ends_within_a_character = |n: &usize| {
            let text = tokenizer.decode(&tokens[..*n]).unwrap();
            text.ends_with(char::REPLACEMENT_CHARACTER)
        };
        assert!((1..tokens.len()).filter(ends_within_a_character).count() >= 4);
        for stop in ["電", "影", "電影 a", "é", "–", "\n\n", "\nUser:", "noir – a lot", ": 2", "Likes"] {
            let stop = [stop.to_owned(), "never".to_owned()];
            let cut = |n: usize| cut_at_stop(&tokens[..n], &stop, &tokenizer).unwrap();
            let whole = |n: usize| tokenizer.decode(&tokens[..n]).unwrap().contains(&stop[0]);
            let first = (1..=tokens.len()).find(|n| whole(*n)).unwrap();
            assert!((1..first).all(|n| cut(n).is_none()), "{stop:?}");
            assert_eq!(cut(first).as_deref(), text.split(&stop[0]).next(), "{stop:?}");
        }
        assert_eq!(cut_at_stop(&tokens, &[], &tokenizer).unwrap(), None);
    }
}
