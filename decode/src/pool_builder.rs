//! Building a pool file: the inverse of [`Pool::open`](crate::Pool::open), deterministic.
//!
//! Takes linear time (induced sorting, libsais) and memory of about 25 bytes per token plus 4 bytes per token of the
//! vocabulary.

use libsais::SuffixArrayConstruction;

use crate::Token;
use crate::frequent::build_frequent;
use crate::pool::{CONTENT_HASH, HEADER, MAGIC, PoolError, PoolMeta, TOKENS_MAX, VERSION};
use crate::sealed::{Preamble, seal};

/// Builds the bytes of the pool file of these texts. Every text is ended by the end-of-text token, so that the end can
/// be drafted too; a text that already contains the token is cut after it.
///
/// # Errors
/// If the vocabulary lacks a token or the end-of-text token, or there are more tokens than [`TOKENS_MAX`].
pub fn build_pool(meta: &PoolMeta, texts: &[Vec<Token>]) -> Result<Vec<u8>, PoolError> {
    meta.check()?;
    let tokens = concatenate(meta, texts)?;
    let suffixes = suffix_array(meta, &tokens)?;
    let ranks: &[u32] = bytemuck::cast_slice(&suffixes);
    let frequent = build_frequent(&tokens, ranks, (meta.vocab_size, meta.end_of_text));
    let counts = [
        ("texts", texts.len()),
        ("tokens", tokens.len()),
        ("distinct tokens", frequent.tokens.len()),
        ("bits", frequent.shift as usize),
        ("tables", frequent.tables.len()),
        ("branches", frequent.branches.len()),
        ("bytes of name", meta.name.len()),
    ];
    let sections: [&[u8]; 6] = [
        bytemuck::cast_slice(&tokens),
        bytemuck::cast_slice(ranks),
        bytemuck::cast_slice(&frequent.tokens),
        bytemuck::cast_slice(&frequent.buckets),
        bytemuck::cast_slice(&frequent.tables),
        bytemuck::cast_slice(&frequent.branches),
    ];
    let sections_at = (HEADER + meta.name.len()).next_multiple_of(4);
    let total: usize = sections.iter().map(|section| section.len()).sum();
    let mut bytes = Vec::with_capacity(sections_at + total);
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
    for section in sections {
        bytes.extend_from_slice(section);
    }
    seal(&mut bytes, CONTENT_HASH, sections_at);
    Ok(bytes)
}

/// Concatenates all texts, each with its end.
fn concatenate(meta: &PoolMeta, texts: &[Vec<Token>]) -> Result<Vec<Token>, PoolError> {
    let total = texts.iter().map(|text| text.len() + 1).sum();
    if total > TOKENS_MAX {
        return Err(too_large(meta, "tokens", total, TOKENS_MAX));
    }
    let mut tokens = Vec::with_capacity(total);
    for (text, content) in texts.iter().enumerate() {
        if let Some(place) = content.iter().position(|&token| token >= meta.vocab_size) {
            let (token, vocabulary) = (content[place], meta.vocab_size);
            let reason = format!(
                "text {text} has token {token} at index {place}, expected less than the vocabulary's {vocabulary}: \
                 tokenise it with the pool's tokenizer"
            );
            return Err(meta.refused(reason));
        }
        tokens.extend(content.iter().take_while(|&&token| token != meta.end_of_text));
        tokens.push(meta.end_of_text);
    }
    Ok(tokens)
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
