//! Grammars that texts follow: which tokens may come next, by [llguidance](https://docs.rs/llguidance).
//!
//! A [`Grammar`] is a JSON schema, a regular expression or a Lark grammar, compiled for one tokenizer. A [`Parser`]
//! walks along one text and back. It tells of single tokens whether they may follow (0.3 us each, once a parser has
//! seen such a text); a mask of the whole vocabulary took 2 us for one of 4,096 tokens, 20 us the first time, and more
//! for a larger one. It is for places where the model's own choice may not follow.
//!
//! Where the grammar leaves one continuation its tokens are *forced*: those that the tokenizer makes of the bytes. They
//! are the only ones allowed there, so a text has the tokens that the model was trained on. What is forced is a
//! function of the text so far, however the text got there.

mod parser;

use std::sync::Arc;

use laser_model::Tokenizer;
use laser_schema::Constraint;
use laser_schema::parsed::{self, ParsedField};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use toktrie::TokEnv;
use toktrie_hf_tokenizers::ByteTokenizer;

pub use parser::{Next, Parser};

/// Why a constraint is of no use.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The tokenizer's tokens have no bytes that are known.
    #[error("the model's tokenizer cannot be constrained: {0}; byte-level and byte-fallback tokenizers can be")]
    Tokenizer(String),
    /// The grammar compiler refused it.
    #[error("cannot be compiled: {0}")]
    Compile(String),
    /// No text follows it.
    #[error("no text follows it: {0}")]
    Empty(String),
    /// The grammar is too complex at some place of a text, or a token was pushed that may not follow.
    #[error("grammar: {0}")]
    Parser(String),
}

/// A constraint, compiled for a tokenizer. Cloning is cheap.
#[derive(Clone)]
pub struct Grammar {
    fresh: Matcher,
    tokens: TokEnv,
    end_of_text: Arc<[u32]>,
    /// Whether texts are JSON, and the fields of the objects that they are.
    is_json: bool,
    fields: Option<Arc<[ParsedField]>>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("is_json", &self.is_json).finish_non_exhaustive()
    }
}

impl Grammar {
    /// Compiles a constraint for texts that end with one of `end_of_text`, the canonical token first.
    ///
    /// # Errors
    /// [`GrammarError`]; also if no text follows the constraint.
    pub fn compile(constraint: &Constraint, tokenizer: &Tokenizer, end_of_text: &[u32]) -> Result<Self, GrammarError> {
        let tokens = environment(tokenizer, end_of_text)?;
        let compile = |error: &dyn std::fmt::Display| GrammarError::Compile(told(error));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| compile(&error))?;
        factory.quiet().limits_mut().verbose_errors = false;
        let grammar = match constraint {
            Constraint::Schema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Grammar(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let parser = factory.create_parser(grammar).map_err(|error| compile(&error))?;
        let grammar = Self {
            fresh: Matcher::new(Ok(parser)),
            tokens,
            end_of_text: end_of_text.into(),
            is_json: matches!(constraint, Constraint::Schema(_)),
            fields: constraint.parsed().map(Into::into),
        };
        grammar.check_first()?;
        Ok(grammar)
    }

    /// Refuses a grammar that no text, or only the empty one, follows.
    fn check_first(&self) -> Result<(), GrammarError> {
        let mut parser = self.parser();
        let empty = |error: GrammarError| GrammarError::Empty(error.to_string());
        let begins = match parser.next_token().map_err(empty)? {
            Next::Forced(_) => true,
            Next::End => false,
            Next::Free => {
                let mask = parser.mask().map_err(empty)?;
                let ends = self.end_of_text.iter().filter(|&&end| mask[end as usize / 32] >> (end % 32) & 1 == 1);
                mask.iter().map(|word| word.count_ones() as usize).sum::<usize>() > ends.count()
            }
        };
        if begins { Ok(()) } else { Err(GrammarError::Empty("only the empty text does".to_owned())) }
    }

    /// A parser at the beginning of a text. It shares nothing with others, so that they may run at once.
    pub fn parser(&self) -> Parser {
        Parser::new(self.fresh.deep_clone(), self.end_of_text.clone())
    }

    /// The text of tokens without their end: exactly the bytes that the grammar has accepted.
    pub fn text(&self, tokens: &[u32]) -> String {
        self.tokens.tok_trie().decode_str(tokens)
    }

    /// Checks what the grammar alone does not hold a whole text to: that it is JSON to those who read it, with values
    /// that fit their columns.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, text: &str) -> Result<(), String> {
        match &self.fields {
            Some(fields) => parsed::parse(text, fields).map(|_| ()),
            None if self.is_json => {
                serde_json::from_str::<Value>(text).map(|_| ()).map_err(|error| format!("not JSON: {error}"))
            }
            None => Ok(()),
        }
    }
}

/// The tokens' bytes, and what makes tokens of bytes.
fn environment(tokenizer: &Tokenizer, end_of_text: &[u32]) -> Result<TokEnv, GrammarError> {
    let refused = |error: &dyn std::fmt::Display| GrammarError::Tokenizer(told(error));
    let mut bytes = ByteTokenizer::from_tokenizer(tokenizer.library().clone()).map_err(|error| refused(&error))?;
    if end_of_text.iter().any(|&token| token as usize >= tokenizer.vocab_size()) {
        return Err(GrammarError::Tokenizer("it does not know the model's end-of-text token".to_owned()));
    }
    bytes.set_eos_tokens(end_of_text);
    bytes.into_tok_env(Some(tokenizer.vocab_size())).map_err(|error| refused(&error))
}

/// A message of llguidance without its mark of brevity, on one line.
fn told(error: &dyn std::fmt::Display) -> String {
    let message = error.to_string().replace("<non-verbose/>", "");
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
