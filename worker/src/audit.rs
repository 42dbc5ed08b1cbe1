//! The audit: the same rows, texts or lists, decoded plainly and with speculation, interleaved on the engine that does
//! the work.

use std::collections::BTreeMap;
use std::time::Instant;

use laser_model::{ModelError, Tokenizer};
use laser_schema::EntityId;
use laser_schema::audit::{Audit, AuditedText, Origin, Piece};
use laser_schema::job::ShardRow;
use laser_schema::knowledge::Figures;
use tokio_util::sync::CancellationToken;

use crate::generate::{Finished, GenerateError, Generated, Request, TextGenerator, whole_characters};

/// Batches that are generated one way before the other's turn. The last texts of a turn do not fill the batch, as a
/// night's do: with one batch a turn, audits at batch 8 told 8 to 10 % less than the night's own rate.
const TURN_BATCHES: usize = 4;

/// Generates every request both ways in turns, so that a drift of the machine's speed affects both alike. Rows that
/// fail either way are left out. `figures` are those of the speculative texts. Once `release` is cancelled there is no
/// audit: it ends after the step in hand and leaves the generator with requests.
///
/// # Errors
/// The engine's, if it is given up.
pub(crate) fn audit(
    generator: &mut dyn TextGenerator,
    requests: &[(&ShardRow, Request)],
    release: &CancellationToken,
    figures: impl Fn(&ShardRow, &Request, &Generated) -> Figures,
) -> Result<Option<Audit>, GenerateError> {
    let mut audit = Audit::default();
    let turns = (requests.len() / (TURN_BATCHES * generator.batch().max(1))).max(1);
    for turn in requests.chunks(requests.len().div_ceil(turns).max(1)) {
        let Some((plain, plain_seconds)) = run(generator, turn, release, true)? else { return Ok(None) };
        let Some((fast, seconds)) = run(generator, turn, release, false)? else { return Ok(None) };
        audit.report.plain_seconds += plain_seconds;
        audit.report.seconds += seconds;
        for (((row, request), plain), fast) in turn.iter().zip(&plain).zip(&fast) {
            if let (Some(plain), Some(fast)) = (plain, fast)
                && let Ok(text) = audited(&row.entity_id, plain, fast, generator.tokenizer())
            {
                audit.figures.add(&figures(row, request, fast));
                add(&mut audit, text);
            }
        }
    }
    Ok(Some(audit))
}

fn add(audit: &mut Audit, text: AuditedText) {
    let report = &mut audit.report;
    report.texts += 1;
    report.identical += u64::from(text.identical);
    report.plain_tokens += text.plain_tokens;
    report.tokens += text.tokens;
    audit.pairs.push(text);
}

fn audited(
    id: &EntityId,
    plain: &Generated,
    fast: &Generated,
    tokenizer: &Tokenizer,
) -> Result<AuditedText, ModelError> {
    let mut proposed = BTreeMap::new();
    for origin in &fast.origins {
        *proposed.entry(origin.source).or_default() += 1;
    }
    Ok(AuditedText {
        entity_id: id.clone(),
        plain: plain.text.clone(),
        plain_tokens: plain.tokens.len() as u64,
        tokens: fast.tokens.len() as u64,
        relaxed: fast.relaxed,
        proposed,
        identical: (&plain.tokens, &plain.items) == (&fast.tokens, &fast.items),
        similarity: None,
        pieces: pieces(fast, tokenizer)?,
    })
}

/// Cuts a text where the origin of its tokens changes. A tokenizer decodes a token differently at a beginning, so each
/// piece is what decoding up to its end adds to the text.
fn pieces(text: &Generated, tokenizer: &Tokenizer) -> Result<Vec<Piece>, ModelError> {
    let mut pieces = Vec::new();
    let (mut at, mut end) = (0, 0);
    for run in text.origins.chunk_by(|a, b| a == b) {
        end += run.len();
        let so_far = whole_characters(tokenizer.decode(&text.tokens[..end])?);
        let upto = text.text.floor_char_boundary(so_far.len());
        if upto > at {
            pieces.push(Piece { text: text.text[at..upto].to_owned(), origin: run[0] });
            at = upto;
        }
    }
    let rest = &text.text[at..];
    match pieces.last_mut() {
        // A list is no text.
        _ if rest.is_empty() => {}
        Some(last) => last.text.push_str(rest),
        None => pieces.push(Piece { text: rest.to_owned(), origin: Origin::TARGET }),
    }
    Ok(pieces)
}

type Texts = Vec<Option<Generated>>;

/// The texts of a turn and the seconds that they took; none once `release` is cancelled.
fn run(
    generator: &mut dyn TextGenerator,
    turn: &[(&ShardRow, Request)],
    release: &CancellationToken,
    plain: bool,
) -> Result<Option<(Texts, f64)>, GenerateError> {
    let start = Instant::now();
    let mut texts: Texts = vec![None; turn.len()];
    for ((_, request), id) in turn.iter().zip(0..) {
        generator.submit(Request { id, plain, ..request.clone() });
    }
    while generator.load() > 0 {
        if release.is_cancelled() {
            return Ok(None);
        }
        for Finished { id, result } in generator.step()? {
            if let Some(text) = usize::try_from(id).ok().and_then(|i| texts.get_mut(i)) {
                *text = result.ok();
            }
        }
    }
    Ok(Some((texts, start.elapsed().as_secs_f64())))
}

#[cfg(test)]
mod tests {

    use laser_schema::audit::Proposer;

    use super::*;

    #[test]
    fn the_pieces_of_a_text_are_the_text_whatever_the_cuts() {
        let model = std::path::absolute("../fixtures/profile-lm").unwrap();
        let tokenizer = Tokenizer::open(&model.join("tokenizer.json")).unwrap();
        let text = "Likes 電影 and café noir – a lot. \u{fffd}";
        let tokens = tokenizer.encode(text, false).unwrap();
        let own = Origin::TARGET;
        let pool = Origin { source: Proposer::Pool, relaxed: true };
        for period in 1..6 {
            let origin = |at: usize| {
                if (at / period).is_multiple_of(2) { own } else { pool }
            };
            let generated = Generated {
                text: text.to_owned(),
                origins: (0..tokens.len()).map(origin).collect(),
                tokens: tokens.clone(),
                ..Generated::default()
            };
            let pieces = pieces(&generated, &tokenizer).unwrap();
            let joined: String = pieces.iter().map(|p| p.text.as_str()).collect();
            assert_eq!(joined, text);
            assert!(pieces.iter().any(|p| p.origin == pool));
            assert!(pieces.iter().all(|p| !p.text.is_empty()));
        }
    }
}
