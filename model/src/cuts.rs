//! Where a text may be cut so that its pieces, tokenised one by one, have the ids of the whole.
//!
//! A text is cut behind a line break between two characters that are not white space, the second of which is no `/`.
//! That this is safe is derived from the tokenizer's file, by [`Ends::of`]:
//!
//! - Added tokens hold no line break, and none takes white space on its left, so no match touches both sides.
//! - Texts are not normalised, or to NFC, in which a line break composes and reorders with nothing.
//! - The pre-tokenizer is one whose patterns are known ([`PATTERNS`], GPT-2's and digits one by one). None of them
//!   goes on behind such a line break (in some, punctuation takes line breaks and `/`), and none looks back. Where a
//!   line break ends a run of white space the patterns do look ahead, so there is no cut.
//! - The model is BPE without dropout, which sees one word at a time, and what is put around a text is put there once.
//!
//! Texts of any other tokenizer are not cut.

use serde_json::Value;

/// The patterns of pre-tokenizers: those of Llama 3 and cl100k, of Qwen 2, of o200k, and of Mistral's Tekken.
const PATTERNS: [&str; 4] = [
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// What a tokenizer whose texts may be cut puts around a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// The ids before it.
    pub(super) before: Vec<u32>,
    /// The ids behind it.
    pub(super) after: Vec<u32>,
}

impl Ends {
    /// Derives from a tokenizer.json whether texts may be cut; `None` if that is not known.
    pub(super) fn of(tokenizer: &Value) -> Option<Self> {
        let tokens = tokenizer["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        let apart =
            |token: &Value| token["lstrip"] != true && !token["content"].as_str().unwrap_or("\n").contains('\n');
        let model = &tokenizer["model"];
        let is_sure = tokens.iter().all(apart)
            && (tokenizer["normalizer"].is_null() || tokenizer["normalizer"]["type"] == "NFC")
            && is_known(&tokenizer["pre_tokenizer"])
            && model["type"] == "BPE"
            && model["dropout"].as_f64().is_none_or(|dropout| dropout == 0.0);
        let mut ends = Self::default();
        (is_sure && ends.read(&tokenizer["post_processor"]).is_some()).then_some(ends)
    }

    /// Reads what a post-processor puts around one text.
    fn read(&mut self, processor: &Value) -> Option<()> {
        match processor["type"].as_str() {
            None if processor.is_null() => Some(()),
            Some("ByteLevel") => Some(()),
            Some("Sequence") => processor["processors"].as_array()?.iter().try_for_each(|inner| self.read(inner)),
            Some("TemplateProcessing") => self.read_template(processor),
            _ => None,
        }
    }

    fn read_template(&mut self, processor: &Value) -> Option<()> {
        let parts = processor["single"].as_array()?;
        let text = parts.iter().position(|part| part["Sequence"]["id"] == "A")?;
        let ids = |parts: &[Value]| -> Option<Vec<u32>> {
            let special =
                |part: &Value| processor["special_tokens"][part["SpecialToken"]["id"].as_str()?]["ids"].as_array();
            let ids = parts.iter().map(special).collect::<Option<Vec<_>>>()?;
            ids.into_iter().flatten().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
        };
        // What a later processor adds stands outside of it.
        self.before.splice(0..0, ids(&parts[..text])?);
        self.after.extend(ids(&parts[text + 1..])?);
        Some(())
    }
}

/// Whether a pre-tokenizer's words never go across a cut.
fn is_known(pre_tokenizer: &Value) -> bool {
    let bytes = |step: &Value, regex: bool| {
        let has_regex = step["use_regex"].as_bool().unwrap_or(true);
        step["type"] == "ByteLevel" && step["add_prefix_space"] == false && has_regex == regex
    };
    let split = |step: &Value| {
        let pattern = step["pattern"]["Regex"].as_str().unwrap_or_default();
        step["type"] == "Split"
            && step["behavior"] == "Isolated"
            && step["invert"] == false
            && PATTERNS.contains(&pattern)
    };
    match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
        Some([first, last]) => (split(first) && bytes(last, false)) || (first["type"] == "Digits" && bytes(last, true)),
        Some(_) => false,
        None => bytes(pre_tokenizer, true),
    }
}

/// The places at which a text may be cut, in order.
pub(super) fn cuts(text: &str) -> impl Iterator<Item = usize> {
    let may_stand = |c: char| !c.is_whitespace();
    text.match_indices('\n').map(|(at, _)| at + 1).filter(move |&at| {
        text[..at - 1].chars().next_back().is_some_and(may_stand)
            && text[at..].chars().next().is_some_and(|c| may_stand(c) && c != '/')
    })
}

/// The pieces of a text that is cut at these places.
pub(super) fn pieces(text: &str, cuts: impl Iterator<Item = usize>) -> impl Iterator<Item = &str> {
    let mut start = 0;
    let pieces = cuts.chain([text.len()]).map(move |end| &text[std::mem::replace(&mut start, end)..end]);
    pieces.filter(|piece| !piece.is_empty())
}

#[cfg(test)]
mod tests;
