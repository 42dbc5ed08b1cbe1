//! Requests, their texts, and what turns the one into the other.

use std::sync::Arc;

use laser_decode::{Pool, PoolMeta};
use laser_engine::EngineError;
use laser_grammar::GrammarError;
use laser_model::{ModelError, Tokenizer};
use laser_schema::audit::Origin;
use laser_schema::knowledge::RunnerUp;

use crate::catalogue::Catalogue;

/// Sequences that fail by themselves, without a text between them, before the engine itself is given up.
pub(crate) const FAILURES_IN_A_ROW_MAX: usize = 8;

/// One text to be generated.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The caller's name for it.
    pub id: u64,
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The tokens of the entity's previous text; empty if there is none.
    pub previous: Vec<u32>,
    /// The pool to draft from.
    pub pool: Option<Pool>,
    /// Without speculation: one token a forward.
    pub plain: bool,
    /// Only what plain decoding gives is accepted, whatever the options say.
    pub strict: bool,
    /// The key of the noise by which the text is drawn, if it is.
    pub key: u64,
    /// Tokens to tell of each place where the target was not sure, beside the one that is written there, at most.
    pub runners_up: usize,
    /// Of a list: the user's items, by their number in the trie.
    pub history: Vec<u32>,
    /// Of a list: the items of the user's previous one, likewise, best first; empty if there is none.
    pub previous_items: Vec<u32>,
    /// Of a list: its items, at least 1; as many as the options say if absent.
    pub items: Option<usize>,
    /// Of a list: the items that there are.
    pub catalogue: Option<Arc<Catalogue>>,
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
    /// Of a list: its items, best first, by their number in the trie, with the natural-log probabilities of their
    /// identifiers; with noise where lists are drawn.
    pub items: Vec<(u32, f64)>,
    /// Its tokens, with the end-of-text token if it ended by one.
    pub tokens: Vec<u32>,
    /// Where each of them comes from.
    pub origins: Vec<Origin>,
    /// The most probable tokens at the places where the target was not sure, if they were [asked
    /// for](Request::runners_up).
    pub runners_up: Vec<RunnerUp>,
    /// Why it ended.
    pub stop: StopReason,
    /// Drafted tokens.
    pub drafted: u64,
    /// Accepted tokens that are not the target's choice.
    pub relaxed: u64,
    /// Tokens that took no forward of their own, because the constraint allowed nothing else.
    pub forced: u64,
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
    pub result: Result<Generated, TextError>,
}

/// Why there is no text for one request, whatever becomes of the others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for a token.
    #[error("the prompt has {length} tokens, but the model's context is {limit}; lower [prompt] max_tokens")]
    PromptTooLong {
        /// Tokens of the prompt.
        length: usize,
        /// Positions of the model.
        limit: usize,
    },
    /// A list has to be of something.
    #[error("the run has no catalogue of items: it makes texts, and this worker's configuration has [lists]")]
    NoCatalogue,
    /// No item may be listed.
    #[error("no item is left to list: all are out of stock or in the user's history")]
    NothingToList,
    /// The forward overflowed.
    #[error("the model's probabilities are not numbers; try a dtype of more range")]
    NotANumber,
    /// A text that no parser would take.
    #[error(
        "the text was cut off after {tokens} tokens, before the constraint let it end; raise [generate] \
         max_new_tokens, or bound what it may write (maxLength, maxItems, {{0,200}})"
    )]
    CutOff {
        /// Tokens of the text.
        tokens: usize,
    },
    /// A text that follows the constraint and yet cannot be read.
    #[error("the text follows the constraint and cannot be read: {0}")]
    Unreadable(String),
    /// The constraint failed for this text.
    #[error("constraint: {0}")]
    Constraint(String),
    /// The tokenizer refused the model's own tokens.
    #[error("{0}")]
    Tokenizer(String),
    /// The engine failed for this request.
    #[error("engine: {0}")]
    Engine(String),
}

impl From<ModelError> for TextError {
    fn from(error: ModelError) -> Self {
        Self::Tokenizer(error.to_string())
    }
}

impl From<GrammarError> for TextError {
    fn from(error: GrammarError) -> Self {
        Self::Constraint(error.to_string())
    }
}

impl From<&EngineError> for TextError {
    fn from(error: &EngineError) -> Self {
        Self::Engine(error.to_string())
    }
}

/// Why the loop cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Sequence after sequence failed, each by itself, and none succeeded.
    #[error("the engine failed for {FAILURES_IN_A_ROW_MAX} sequences in a row; the last time: {0}")]
    Engine(EngineError),
}

/// Turns requests into texts, a batch at a time: all that the worker's life needs to know of an engine.
pub trait TextGenerator: Send {
    /// The tokenizer of texts and prompts.
    fn tokenizer(&self) -> &Tokenizer;

    /// Where it computes, e.g. `cuda:0`.
    fn device(&self) -> &str;

    /// What a pool of its texts is, if it drafts from pools.
    fn pool_meta(&self) -> Option<PoolMeta> {
        None
    }

    /// Whether measured costs choose its drafts, so that a relaxed text may differ from run to run.
    fn adapts(&self) -> bool {
        false
    }

    /// Requests that are worked on at once, at most.
    fn batch(&self) -> usize;

    /// Requests that have not ended.
    fn load(&self) -> usize;

    /// Adds a request; it joins the batch as soon as there is room.
    fn submit(&mut self, request: Request);

    /// Computes what `prompts` have in common at their start once instead of for each of them, where that is possible.
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
