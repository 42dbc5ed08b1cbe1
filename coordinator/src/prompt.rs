//! Prompts: an entity and a template become the tokens that the model reads.
//!
//! A prompt never exceeds its token budget. If a history does not fit, its oldest interactions are dropped, no more
//! than needed: one more interaction would not fit. The same entity, templates and model give the same tokens every
//! night, because nothing here reads a clock or draws a random number.
//!
//! One prompt costs one rendering and tokenisation if a short history fits (about 1 ms for 1,000 tokens). Otherwise it
//! costs about three, because interactions have similar lengths, and at most about 4·log₂(kept interactions). No try is
//! much over twice the budget, however long the history is.

pub(crate) mod fields;
mod search;
mod template;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use laser_model::{ChatTemplate, Message, ModelError, ModelFiles, PieceTokenizer};
use laser_schema::{Digest, Entity, Kind};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use fields::Fields;
use search::Search;
use template::Templates;

/// The budget of a prompt where neither the configuration nor the model asks for less.
const MAX_TOKENS: usize = 1024;

/// Which prompts are made. All of it changes tokens, so all of it belongs to the run's specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromptConfig {
    /// The template for users: a shipped one (`kar/films`, `trawl/books`, `once/films`, `rlmrec/books`, …,
    /// `plain/films`; `lists/codes` for lists) or the path of a .j2 or .jinja file.
    pub user: String,
    /// The template for items, likewise.
    pub item: String,
    /// Whether prompts use the model's chat format: true, false, or "auto" to use it if the model has one.
    pub chat: Chat,
    /// The system message. Without chat format it stands before the prompt, followed by an empty line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// The most tokens of a prompt, special tokens and chat format included. If not given, 1,024; for a model with
    /// fewer positions, as many as the longest text leaves, at least half of the positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// The most interactions of a history that a template sees, the latest; all if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_history: Option<usize>,
}

impl Default for PromptConfig {
    fn default() -> Self {
        Self {
            user: "kar/films".into(),
            item: "kar/films".into(),
            chat: Chat::Auto,
            system: None,
            max_tokens: None,
            max_history: None,
        }
    }
}

impl PromptConfig {
    /// The budget of a prompt for a model with so many positions and texts of at most `max_new_tokens`.
    fn budget(&self, positions: usize, max_new_tokens: usize) -> usize {
        let left = positions.saturating_sub(max_new_tokens).max(positions / 2);
        self.max_tokens.unwrap_or(MAX_TOKENS.min(left))
    }
}

/// Whether prompts take the model's chat format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Chat {
    /// Always; a model without a chat template is refused.
    Always,
    /// Never: prompts are plain text, for completion models.
    Never,
    /// If the model has a chat template.
    Auto,
}

impl From<Chat> for Value {
    fn from(chat: Chat) -> Self {
        match chat {
            Chat::Always => true.into(),
            Chat::Never => false.into(),
            Chat::Auto => "auto".into(),
        }
    }
}

impl TryFrom<Value> for Chat {
    type Error = String;

    /// Environment variables and flags pass booleans as text.
    fn try_from(value: Value) -> Result<Self, String> {
        match value.as_str() {
            _ if value == true => Ok(Self::Always),
            _ if value == false => Ok(Self::Never),
            Some("true") => Ok(Self::Always),
            Some("false") => Ok(Self::Never),
            Some("auto") => Ok(Self::Auto),
            _ => Err(format!("expected true, false or \"auto\", got {value}")),
        }
    }
}

/// The reasons why a prompt could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The name is neither a shipped template nor a template file.
    #[error(
        "prompt template {name:?} does not exist for {kind}s; expected one of {shipped}, or the path of a .j2 or \
         .jinja file"
    )]
    UnknownTemplate {
        /// The template as configured.
        name: String,
        /// Whose prompts it is to make.
        kind: Kind,
        /// The shipped ones.
        shipped: String,
    },
    /// A template file could not be read.
    #[error("prompt template {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A template is invalid, or failed on an entity.
    #[error("prompt template {template}, line {line}: {reason}")]
    Template {
        /// The template's name or file.
        template: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A template uses a field that the entity does not have.
    #[error(
        "prompt template {template}, line {line}: {entity} has no {field}; it has {available}. Test with `is \
         defined`, or give a `default`, for what only some entities have"
    )]
    UnknownField {
        /// The template's name or file.
        template: String,
        /// The line, from 1.
        line: usize,
        /// Kind and id.
        entity: String,
        /// The expression in the template.
        field: String,
        /// The fields there are.
        available: String,
    },
    /// Even without history the prompt exceeds its budget.
    #[error("the prompt of {entity} has {tokens} tokens without its history, more than max_tokens = {budget}")]
    TooLong {
        /// Kind and id.
        entity: String,
        /// Tokens of the prompt without history.
        tokens: usize,
        /// The largest number allowed.
        budget: usize,
    },
    /// The budget cannot be kept.
    #[error(
        "max_tokens = {budget}: must be at least 1 and below the {positions} positions of the model, or of its sliding \
         window, so that there is room for text"
    )]
    Budget {
        /// The budget as configured.
        budget: usize,
        /// The positions of the model, or of a smaller sliding window.
        positions: usize,
    },
    /// Chat format is required and the model has none.
    #[error("chat = true, but the model in {directory} has no chat template; set chat = false, or \"auto\"")]
    NoChatTemplate {
        /// The model's directory.
        directory: PathBuf,
    },
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A prompt within its budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The text that was tokenised.
    pub text: String,
    /// Its tokens, including special tokens.
    pub tokens: Vec<u32>,
    /// Number of latest interactions that the template saw.
    pub history_used: usize,
}

/// Renders prompts for one model. Threads may share it.
#[derive(Debug)]
pub struct PromptRenderer {
    templates: Templates,
    chat: Option<ChatTemplate>,
    system: Option<String>,
    tokenizer: PieceTokenizer,
    max_tokens: usize,
    max_history: Option<usize>,
}

impl PromptRenderer {
    /// Loads and checks the templates, for texts of at most `max_new_tokens`. Warns where the longest prompts leave
    /// fewer.
    ///
    /// # Errors
    /// All of [`PromptError`] that need no entity.
    pub fn new(config: &PromptConfig, model: &ModelFiles, max_new_tokens: usize) -> Result<Self, PromptError> {
        let positions = model.max_positions.unwrap_or(usize::MAX);
        let budget = config.budget(positions, max_new_tokens);
        if budget == 0 || budget >= positions {
            return Err(PromptError::Budget { budget, positions });
        }
        let left = positions - budget;
        if left < max_new_tokens {
            tracing::warn!(
                max_tokens = budget,
                max_new_tokens,
                positions,
                "texts of the longest prompts end after {left} tokens; lower [prompt] max_tokens or [generate] \
                 max_new_tokens"
            );
        }
        let chat = match (config.chat, &model.chat_template) {
            (Chat::Never, _) | (Chat::Auto, None) => None,
            (_, Some(template)) => Some(template.clone()),
            (Chat::Always, None) => {
                return Err(PromptError::NoChatTemplate { directory: model.directory.clone() });
            }
        };
        Ok(Self {
            templates: Templates::load(&config.user, &config.item)?,
            chat,
            system: config.system.clone(),
            tokenizer: PieceTokenizer::new(model.tokenizer.clone()),
            max_tokens: budget,
            max_history: config.max_history,
        })
    }

    /// Renders the prompt of an entity with as much of its latest history as fits.
    ///
    /// # Errors
    /// [`PromptError::UnknownField`], [`PromptError::TooLong`], and errors of the template or the model.
    pub fn render(&self, entity: &Entity) -> Result<RenderedPrompt, PromptError> {
        let mut fields = Fields::new(entity);
        let history = entity.history.len();
        let longest = history.min(self.max_history.unwrap_or(usize::MAX));
        let mut search = Search::new(longest, self.max_tokens);
        while let Some(kept) = search.next() {
            let prompt = self.render_with(&mut fields, kept)?;
            search.tell(prompt);
        }
        search.best.ok_or_else(|| PromptError::TooLong {
            entity: fields.entity(),
            tokens: search.too_long.1,
            budget: self.max_tokens,
        })
    }

    /// Returns the digest of everything that determines the prompts of a kind except entities and tokenizer.
    pub fn digest(&self, kind: Kind) -> Digest {
        Digest::of_json(&(
            self.templates.sources(kind),
            self.chat.as_ref().map(ChatTemplate::digest),
            &self.system,
            self.max_tokens,
            self.max_history,
        ))
    }

    /// Renders with special tokens only if no chat template is used: a chat template writes its own, and a second
    /// beginning-of-text token would confuse the model.
    fn render_with(&self, fields: &mut Fields, kept: usize) -> Result<RenderedPrompt, PromptError> {
        let body = self.templates.render(fields, kept)?;
        let text = match (&self.chat, &self.system) {
            (Some(chat), system) => {
                let message = |role, content| Message { role, content };
                let system = system.as_deref().map(|s| message("system", s));
                let user = message("user", body.trim());
                let messages: Vec<_> = system.into_iter().chain([user]).collect();
                chat.render(&messages, true)?
            }
            (None, Some(system)) => format!("{system}\n\n{body}"),
            (None, None) => body,
        };
        Ok(RenderedPrompt { tokens: self.tokenizer.encode(&text, self.chat.is_none())?, text, history_used: kept })
    }
}
