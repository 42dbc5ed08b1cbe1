//! Previous texts: sampled into their groups, then tokenised.
//!
//! A text belongs to the groups of its entity and to that of everything. Sampling is by hash, so
//! neither order nor batches matter; texts are held once however many groups have them, and no more
//! of them than the samples hold.

use std::collections::{BTreeMap, HashMap};
use std::num::TryFromIntError;
use std::sync::Arc;

use futures::{Stream, StreamExt, pin_mut};
use laser_decode::Token;
use laser_schema::Kind;
use laser_schema::model::ModelFiles;
use laser_schema::previous::PreviousText;
use tokenizers::Tokenizer;

use crate::error::PoolsError;
use crate::fit::FittedKind;
use crate::pool_set::TextCounts;
use crate::progress::{BuildProgress, Progress, Stage};
use crate::router::ALL;
use crate::sample::{Sample, priority};

/// Texts tokenised at once: enough for all cores, few enough to show progress.
const TOKENISE_BATCH: usize = 256;

/// What a reader of previous texts fails with.
pub type ReadError = Box<dyn std::error::Error + Send + Sync>;

/// The tokenizer of the model that drafts are made for, and what pools say of it.
#[derive(Debug, Clone, Copy)]
pub struct PoolTokenizer<'a> {
    /// Texts are encoded without special tokens.
    pub tokenizer: &'a Tokenizer,
    /// Tells it from every other tokenizer.
    pub fingerprint: [u8; 32],
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// The token that ends a text.
    pub end_of_text: Token,
}

impl<'a> PoolTokenizer<'a> {
    /// A model's tokenizer; texts end with its canonical end-of-text token.
    ///
    /// # Errors
    /// If the vocabulary has more ids than fit u32.
    pub fn of(model: &'a ModelFiles) -> Result<Self, TryFromIntError> {
        let tokenizer = &model.tokenizer;
        Ok(Self {
            tokenizer: tokenizer.library(),
            fingerprint: tokenizer.fingerprint(),
            vocab_size: u32::try_from(tokenizer.vocab_size())?,
            end_of_text: model.end_of_text[0],
        })
    }
}

/// The sampled texts of all groups of one kind.
#[derive(Debug)]
pub(crate) struct SampledKind {
    /// By group, in the router's order.
    pub(crate) groups: Vec<Sample<Arc<str>>>,
    /// Texts by group before sampling.
    pub(crate) offered: Vec<u64>,
}

/// Reads all texts and samples at most `capacity` of them for each group.
pub(crate) async fn sample<P>(
    previous: P,
    kinds: &BTreeMap<Kind, FittedKind>,
    seed: u64,
    capacity: impl Fn(Kind) -> usize,
    progress: Progress<'_>,
) -> Result<(BTreeMap<Kind, SampledKind>, TextCounts), PoolsError>
where
    P: Stream<Item = Result<Vec<PreviousText>, ReadError>>,
{
    let sampled = |(&kind, fitted): (&Kind, &FittedKind)| {
        let groups = fitted.router.groups().len();
        let sample = Sample::new(capacity(kind));
        (
            kind,
            SampledKind {
                groups: vec![sample; groups],
                offered: vec![0; groups],
            },
        )
    };
    let mut samples: BTreeMap<Kind, SampledKind> = kinds.iter().map(sampled).collect();
    let mut counts = TextCounts::default();
    pin_mut!(previous);
    while let Some(batch) = previous.next().await {
        for text in batch.map_err(PoolsError::Previous)? {
            counts.read += 1;
            offer(text, kinds, &mut samples, seed, &mut counts);
        }
        progress(BuildProgress {
            stage: Stage::ReadTexts,
            done: counts.read,
            total: None,
        });
    }
    Ok((samples, counts))
}

fn offer(
    previous: PreviousText,
    kinds: &BTreeMap<Kind, FittedKind>,
    samples: &mut BTreeMap<Kind, SampledKind>,
    seed: u64,
    counts: &mut TextCounts,
) {
    let PreviousText { kind, id, text, .. } = previous;
    if text.trim().is_empty() {
        counts.empty += 1;
        return;
    }
    let (Some(fitted), Some(sampled)) = (kinds.get(&kind), samples.get_mut(&kind)) else {
        counts.of_other_kind += 1;
        return;
    };
    let groups = fitted.members.get(&id);
    counts.without_entity += u64::from(groups.is_none());
    let parts = [
        kind.as_str().as_bytes(),
        id.to_string().as_bytes(),
        text.as_bytes(),
    ]
    .map(<[u8]>::to_vec);
    let priority = priority(seed, &parts.each_ref().map(Vec::as_slice));
    let text: Arc<str> = text.into();
    let of_entity = groups
        .into_iter()
        .flatten()
        .flatten()
        .map(|&(group, _)| group);
    for group in of_entity.filter(|&group| group != ALL).chain([ALL]) {
        sampled.offered[group] += 1;
        sampled.groups[group].offer(priority, || text.clone());
    }
}

/// The tokens of all sampled texts, by the text's priority; without those that have no token.
pub(crate) fn tokenise(
    samples: &BTreeMap<Kind, SampledKind>,
    tokenizer: &Tokenizer,
    progress: Progress<'_>,
) -> Result<HashMap<u128, Vec<Token>>, PoolsError> {
    let groups = samples.values().flat_map(|sampled| &sampled.groups);
    let texts: BTreeMap<u128, &Arc<str>> = groups.flat_map(Sample::iter).collect();
    let texts: Vec<(u128, &str)> = texts.into_iter().map(|(p, text)| (p, &**text)).collect();
    let total = texts.len() as u64;
    let mut tokens = HashMap::with_capacity(texts.len());
    for batch in texts.chunks(TOKENISE_BATCH) {
        let inputs: Vec<&str> = batch.iter().map(|&(_, text)| text).collect();
        let encodings = tokenizer
            .encode_batch_fast(inputs, false)
            .map_err(PoolsError::Tokenizer)?;
        for (&(priority, _), encoding) in batch.iter().zip(encodings) {
            tokens.insert(priority, encoding.get_ids().to_vec());
        }
        let done = tokens.len() as u64;
        progress(BuildProgress {
            stage: Stage::Tokenise,
            done,
            total: Some(total),
        });
    }
    tokens.retain(|_, tokens| !tokens.is_empty());
    Ok(tokens)
}

impl SampledKind {
    /// The tokens of a group's texts, in the order of the sample.
    pub(crate) fn tokens(&self, group: usize, of: &HashMap<u128, Vec<Token>>) -> Vec<Vec<Token>> {
        self.groups[group]
            .iter()
            .filter_map(|(priority, _)| of.get(&priority).cloned())
            .collect()
    }
}
