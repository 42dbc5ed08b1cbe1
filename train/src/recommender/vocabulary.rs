//! The codes of identifiers as tokens, and as a tokenizer's file.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use laser_decode::Token;
use serde_json::{Value, json};

use crate::recommender::belongs::RecommenderBelongs;

/// Tokens that are no codes: for text that no code matches, for the start of a prompt, and for an end, which models
/// must have although identifiers end by their length.
const SPECIAL: [&str; 3] = ["<unk>", "<s>", "</s>"];
const UNKNOWN: usize = 0;

/// The token that begins every prompt.
pub(crate) const START: Token = 1;

/// The token that ends a text.
pub(crate) const END: Token = 2;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The codes that a recommender reads and writes. Each is one token: `<unk>`, `<s>` and `</s>` come first, then the
/// codes of the first level in their order, those of the second, and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeVocabulary {
    /// Of each level its codes.
    levels: Vec<Vec<String>>,
    /// Of each code its level and token.
    tokens: HashMap<String, (usize, Token)>,
}

impl CodeVocabulary {
    /// Takes the codes of each level, in the order of their tokens.
    ///
    /// # Errors
    /// Levels without codes, codes that are not of the form `<name>`, and codes that are there twice.
    pub fn new(levels: Vec<Vec<String>>) -> Result<Self> {
        ensure!(!levels.is_empty(), "identifiers of no levels: expected at least one code each");
        let mut tokens = HashMap::new();
        let mut next = Token::try_from(SPECIAL.len())?;
        for (level, codes) in levels.iter().enumerate() {
            ensure!(!codes.is_empty(), "level {} of the identifiers has no codes", level + 1);
            for code in codes {
                ensure!(
                    is_code(code),
                    "{code:?}: expected a code of the form <a_47>, without spaces and other brackets"
                );
                let known = tokens.insert(code.clone(), (level, next));
                ensure!(
                    known.is_none() && !SPECIAL.contains(&code.as_str()),
                    "{code}: is a code already; every level needs names of its own, such as <a_47> and <b_47>"
                );
                next += 1;
            }
        }
        Ok(Self { levels, tokens })
    }

    /// Takes the codes from identifiers; those of a level are sorted.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and identifiers of different lengths.
    pub fn of_identifiers<'a>(identifiers: impl IntoIterator<Item = &'a [String]>) -> Result<Self> {
        let mut levels: Vec<Vec<String>> = Vec::new();
        for codes in identifiers {
            levels.resize_with(levels.len().max(codes.len()), Vec::new);
            levels.iter_mut().zip(codes).for_each(|(level, code)| level.push(code.clone()));
            ensure!(
                codes.len() == levels.len(),
                "the identifier {} has {} codes, another one {}",
                codes.concat(),
                codes.len(),
                levels.len()
            );
        }
        for level in &mut levels {
            level.sort_unstable();
            level.dedup();
        }
        Self::new(levels)
    }

    /// Reads that of the recommender in a folder.
    ///
    /// # Errors
    /// A folder without a recommender of Laser's, or whose tokenizer is not its own.
    pub fn open(folder: &Path) -> Result<Self> {
        let belongs = RecommenderBelongs::open(folder)?;
        let belongs = belongs.with_context(|| format!("{}: not a recommender that Laser trained", folder.display()))?;
        let file = folder.join(TOKENIZER);
        let read = || -> Result<Self> {
            let json: Value = serde_json::from_slice(&fs::read(&file)?)?;
            let vocabulary: HashMap<String, Token> = serde_json::from_value(json["model"]["vocab"].clone())?;
            let mut codes: Vec<(String, Token)> = vocabulary.into_iter().collect();
            codes.sort_unstable_by_key(|(_, token)| *token);
            let mut codes = codes.into_iter().skip(SPECIAL.len()).map(|(code, _)| code);
            Self::new(belongs.levels.iter().map(|&count| codes.by_ref().take(count).collect()).collect())
        };
        read().with_context(|| format!("{}: not the codes of a recommender", file.display()))
    }

    /// Checks that the recommender in a folder has the same codes.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), and other codes, naming one that only one of them has.
    pub fn check(&self, folder: &Path) -> Result<()> {
        let known = Self::open(folder)?;
        let difference = match (self.code_not_of(&known), known.code_not_of(self)) {
            (Some(code), _) => format!(": it does not know {code}"),
            (None, Some(code)) => format!(": no item has {code}"),
            (None, None) => String::new(),
        };
        ensure!(
            known == *self,
            "{}: its codes are others than those of the identifiers{difference}; train it on the same ones",
            folder.display()
        );
        Ok(())
    }

    /// The first code that another vocabulary does not have at the same level.
    fn code_not_of(&self, other: &Self) -> Option<&str> {
        let levels = self.levels.iter().enumerate();
        let mut codes = levels.flat_map(|(level, codes)| codes.iter().map(move |code| (level, code)));
        let found = codes.find(|(level, code)| other.tokens.get(*code).is_none_or(|known| known.0 != *level));
        found.map(|(_, code)| code.as_str())
    }

    /// The number of codes in an identifier.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    /// The number of codes at each level.
    #[must_use]
    pub fn sizes(&self) -> Vec<usize> {
        self.levels.iter().map(Vec::len).collect()
    }

    /// The number of tokens, special ones included.
    #[must_use]
    pub fn size(&self) -> usize {
        SPECIAL.len() + self.tokens.len()
    }

    /// The tokens of a level, which counts from 0; empty if there is no such level.
    #[must_use]
    pub fn level(&self, level: usize) -> Range<usize> {
        let before: usize = self.levels.iter().take(level).map(Vec::len).sum();
        let begin = SPECIAL.len() + before;
        begin..begin + self.levels.get(level).map_or(0, Vec::len)
    }

    /// The tokens of an identifier.
    ///
    /// # Errors
    /// Too few or too many codes, and codes that are not of their level.
    pub fn tokens(&self, codes: &[String]) -> Result<Vec<Token>> {
        let depth = self.depth();
        ensure!(codes.len() == depth, "{}: {} codes, expected {depth}", codes.concat(), codes.len());
        let of = |(level, code): (usize, &String)| match self.tokens.get(code) {
            Some(&(known, token)) if known == level => Ok(token),
            Some((known, _)) => bail!("{code}: a code of level {}, found at level {}", known + 1, level + 1),
            None => bail!("{code}: not among the {} codes of level {}", self.levels[level].len(), level + 1),
        };
        codes.iter().enumerate().map(of).collect()
    }

    /// The code of a token; none for special and unknown tokens.
    #[must_use]
    pub fn code(&self, token: Token) -> Option<&str> {
        let at = usize::try_from(token).ok()?.checked_sub(SPECIAL.len())?;
        self.levels.iter().flatten().nth(at).map(String::as_str)
    }

    pub(crate) fn levels(&self) -> &[Vec<String>] {
        &self.levels
    }

    /// The files of its tokenizer by name. Text like `<a_47><b_103>` is one token a code; encoded with special tokens,
    /// it begins with the start.
    pub(crate) fn files(&self) -> [(&'static str, Value); 2] {
        let special = SPECIAL.iter().enumerate().map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
        });
        let all = SPECIAL.into_iter().chain(self.levels.iter().flatten().map(String::as_str));
        let vocabulary: serde_json::Map<String, Value> =
            all.zip(0..).map(|(t, id)| (t.to_owned(), id.into())).collect();
        let start = SPECIAL[START as usize];
        let begin = json!({ "SpecialToken": { "id": start, "type_id": 0 } });
        let [first, second] = ["A", "B"].map(|id| json!({ "Sequence": { "id": id, "type_id": 0 } }));
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": special.collect::<Vec<_>>(),
            "normalizer": null,
            "pre_tokenizer": {
                "type": "Split", "pattern": { "Regex": "<[^<>]*>" }, "behavior": "Isolated", "invert": false
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [begin, first],
                "pair": [begin, first, begin, second],
                "special_tokens": { start: { "id": start, "ids": [START], "tokens": [start] } }
            },
            "decoder": { "type": "Fuse" },
            "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": SPECIAL[UNKNOWN] }
        });
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIAL[UNKNOWN],
            "bos_token": start,
            "eos_token": SPECIAL[END as usize],
            "clean_up_tokenization_spaces": false
        });
        [(TOKENIZER, tokenizer), (TOKENIZER_CONFIG, config)]
    }
}

/// Whether the tokenizer finds it in a text without spaces.
fn is_code(code: &str) -> bool {
    let name = code.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
    name.is_some_and(|name| !name.is_empty() && !name.contains(|c: char| "<>".contains(c) || c.is_whitespace()))
}
