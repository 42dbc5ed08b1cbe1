//! The model's chat format, rendered as the models' own Python environment would.
//!
//! Prompts must be the same every night for the same entity, so nothing here reads the clock: a template that asks
//! for today's date (`strftime_now`) gets a fixed one. Templates with a thinking switch get it turned off,
//! since what is wanted is the answer alone.

use std::sync::Arc;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;

use super::ModelError;
use laser_schema::digest::Digest;

/// The date that the Llama 3 templates themselves fall back to.
const DATE: jiff::civil::Date = jiff::civil::date(2024, 7, 26);

const NAME: &str = "chat_template";

/// One message of a chat.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Message<'a> {
    /// `system`, `user` or `assistant`.
    pub role: &'a str,
    /// Its text.
    pub content: &'a str,
}

/// A chat template with the special tokens it may write. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    bos_token: Arc<str>,
    eos_token: Arc<str>,
}

impl ChatTemplate {
    /// A template from its source; errors in it show in [`render`](Self::render).
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Self {
        let (mut environment, source) = (environment(), without_generation_tags(source));
        // Compiled once for all prompts. One that does not compile is told by rendering, which compiles it again.
        let _ = environment.add_template_owned(NAME, source.clone());
        Self {
            environment: Arc::new(environment),
            source: source.into(),
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
        }
    }

    /// The messages as one text, which holds its special tokens already. With `add_generation_prompt` it ends
    /// where the assistant begins to speak.
    ///
    /// # Errors
    /// [`ModelError::Chat`] for a template that is wrong or refuses the messages (some know no system role).
    pub fn render(&self, messages: &[Message<'_>], add_generation_prompt: bool) -> Result<String, ModelError> {
        let context = context! {
            messages,
            add_generation_prompt,
            bos_token => &*self.bos_token,
            eos_token => &*self.eos_token,
            enable_thinking => false,
        };
        let rendered = match self.environment.get_template(NAME) {
            Ok(template) => template.render(context),
            Err(_) => self.environment.render_named_str(NAME, &self.source, context),
        };
        rendered.map_err(|e| ModelError::Chat { reason: e.to_string() })
    }

    /// The digest of all that a rendered text depends on but the messages.
    pub fn digest(&self) -> Digest {
        Digest::of_parts([&self.source, &self.bos_token, &self.eos_token].map(|s| s.as_bytes()))
    }
}

/// The environment of `apply_chat_template` in transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let midnight = DATE.at(0, 0, 0, 0);
    jiff::fmt::strtime::format(format, midnight).map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// `{% generation %}` marks the assistant's words for training; as a comment it keeps its whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut source = source.to_owned();
    for word in ["generation", "endgeneration"] {
        for (open, close) in [("", ""), ("-", ""), ("", "-"), ("-", "-")] {
            source = source.replace(&format!("{{%{open} {word} {close}%}}"), &format!("{{#{open} {word} {close}#}}"));
        }
    }
    source
}
