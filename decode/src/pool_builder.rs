//! Building a pool file: the inverse of [`Pool::open`](crate::Pool::open), deterministic.
//!
//! Takes linear time (induced sorting, libsais) and memory of about 25 bytes per token plus 4 bytes per token of the
//! vocabulary.

use libsais::SuffixArrayConstruction;

use crate::Token;
use crate::frequent::build_frequent;
use crate::pool::{CONTENT_HASH, HEADER, MAGIC, PoolError, PoolMeta, TOKENS_MAX, VERSION};
use crate::runners_up::{PoolText, RunnerUp, RunnersUpBuilder};
use crate::sealed::{Preamble, seal};

/// Builds the bytes of the pool file of these texts. Every text is ended by the end-of-text token, so that the end can
/// be drafted too; a text that already contains the token is cut after it.
///
/// # Errors
/// If the vocabulary lacks a token or the end-of-text token, or there are more tokens than [`TOKENS_MAX`].
pub fn build_pool(meta: &PoolMeta, texts: impl IntoIterator<Item = impl Into<PoolText>>) -> Result<Vec<u8>, PoolError> {
    meta.check()?;
    let Concatenated { texts, tokens, runners_up } = concatenate(meta, texts)?;
    let suffixes = suffix_array(meta, &tokens)?;
    let ranks: &[u32] = bytemuck::cast_slice(&suffixes);
    let frequent = build_frequent(&tokens, ranks, (meta.vocab_size, meta.end_of_text));
    let counted: [&[u8]; 6] = [
        bytemuck::cast_slice(&tokens),
        bytemuck::cast_slice(ranks),
        bytemuck::cast_slice(&frequent.tokens),
        bytemuck::cast_slice(&frequent.buckets),
        bytemuck::cast_slice(&frequent.tables),
        bytemuck::cast_slice(&frequent.branches),
    ];
    let sections_at = (HEADER + meta.name.len()).next_multiple_of(4);
    let rest = sections_at + counted.iter().map(|section| section.len()).sum::<usize>();
    let runners_up = RunnersUpBuilder::build(&tokens, &runners_up, (meta.vocab_size, rest));
    let counts = [
        ("texts", texts),
        ("tokens", tokens.len()),
        ("distinct tokens", frequent.tokens.len()),
        ("bits", frequent.shift as usize),
        ("tables", frequent.tables.len()),
        ("branches", frequent.branches.len()),
        ("contested tokens", runners_up.races.len()),
        ("runners-up", runners_up.count),
        ("bytes of name", meta.name.len()),
    ];
    let contested: [&[u8]; 3] =
        [bytemuck::cast_slice(&runners_up.known), bytemuck::cast_slice(&runners_up.others), &runners_up.races];
    let mut bytes = Vec::with_capacity(rest + contested.iter().map(|section| section.len()).sum::<usize>());
    Preamble::write(&mut bytes, MAGIC, VERSION);
    bytes.extend(meta.tokenizer);
    bytes.extend([0; 32]);
    bytes.extend(meta.vocab_size.to_le_bytes());
    bytes.extend(meta.end_of_text.to_le_bytes());
    for (what, count) in counts {
        let too_large = |_| too_large(meta, what, count, u32::MAX as usize);
        bytes.extend(u32::try_from(count).map_err(too_large)?.to_le_bytes());
    }
    bytes.extend(meta.name.as_bytes());
    bytes.resize(sections_at, 0);
    counted.into_iter().chain(contested).for_each(|section| bytes.extend_from_slice(section));
    bytes.resize(bytes.len() + runners_up.races.len().next_multiple_of(4) - runners_up.races.len(), 0);
    seal(&mut bytes, CONTENT_HASH, sections_at);
    Ok(bytes)
}

/// All texts, each with its end.
#[derive(Default)]
struct Concatenated {
    texts: usize,
    tokens: Vec<Token>,
    /// Their places are those among all tokens.
    runners_up: Vec<RunnerUp>,
}

fn concatenate(
    meta: &PoolMeta,
    texts: impl IntoIterator<Item = impl Into<PoolText>>,
) -> Result<Concatenated, PoolError> {
    let mut all = Concatenated::default();
    for text in texts {
        let PoolText { tokens, runners_up } = text.into().ended((meta.vocab_size, meta.end_of_text));
        if let Some(place) = tokens.iter().position(|&token| token >= meta.vocab_size) {
            let (text, token, vocabulary) = (all.texts, tokens[place], meta.vocab_size);
            let reason = format!(
                "text {text} has token {token} at index {place}, expected less than the vocabulary's {vocabulary}: \
                 tokenise it with the pool's tokenizer"
            );
            return Err(meta.refused(reason));
        }
        let total = all.tokens.len() + tokens.len() + 1;
        let first = u32::try_from(all.tokens.len()).ok().filter(|_| total <= TOKENS_MAX);
        let first = first.ok_or_else(|| too_large(meta, "tokens", total, TOKENS_MAX))?;
        all.runners_up.extend(runners_up.iter().map(|other| RunnerUp { place: first + other.place, ..*other }));
        all.tokens.extend(tokens);
        all.tokens.push(meta.end_of_text);
        all.texts += 1;
    }
    Ok(all)
}

/// Returns the starts of all suffixes in lexicographic order.
fn suffix_array(meta: &PoolMeta, tokens: &[Token]) -> Result<Vec<i32>, PoolError> {
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let mut text: Vec<i32> = bytemuck::cast_slice(tokens).to_vec();
    let construction = SuffixArrayConstruction::for_text_mut(&mut text).in_owned_buffer32();
    let suffixes = construction.single_threaded().run().map_err(|error| {
        meta.refused(format!("building the suffix array of {} tokens failed: {error}", tokens.len()))
    })?;
    Ok(suffixes.into_vec())
}

fn too_large(meta: &PoolMeta, what: &str, found: usize, max: usize) -> PoolError {
    meta.refused(format!("{found} {what}, at most {max} fit: sample fewer texts or split the group"))
}
