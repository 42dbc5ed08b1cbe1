//! Previous texts: joined with their entities, sampled into their groups, then tokenised.
//!
//! A text belongs to its entity's groups and to the group of everything. Sampling is by hash, so neither order nor
//! batches matter. A text is held once however many groups have it, and no more texts are held than the samples need:
//! `max_texts` per group.

use std::collections::{BTreeMap, HashMap};
use std::num::TryFromIntError;
use std::sync::Arc;

use futures::{Stream, StreamExt, pin_mut};
use laser_decode::{PoolText, RunnerUp, Token};
use laser_model::ModelFiles;
use laser_schema::{EntityId, Kind};
use laser_store::join::Join;
use laser_store::previous::PreviousText;
use tokenizers::Tokenizer;

use crate::Progress;
use crate::error::PoolsError;
use crate::pool_set::TextCounts;
use crate::router::ALL;
use laser_schema::sample::{Sample, priority};

/// Texts tokenised at once: enough for all cores, few enough to show progress.
const TOKENISE_BATCH: usize = 256;

/// The error of a reader of previous texts.
pub type ReadError = Box<dyn std::error::Error + Send + Sync>;

/// The tokenizer of the model that drafts are made for, with its description for pools.
#[derive(Debug, Clone, Copy)]
pub struct PoolTokenizer<'a> {
    /// The tokenizer; texts are encoded without special tokens.
    pub tokenizer: &'a Tokenizer,
    /// Identifies the tokenizer.
    pub fingerprint: [u8; 32],
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// The token that ends a text.
    pub end_of_text: Token,
}

impl<'a> PoolTokenizer<'a> {
    /// Returns a model's tokenizer; texts end with its canonical end-of-text token.
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

/// A text with what lost against its tokens, of the places where that is known.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Written {
    text: String,
    runners_up: Vec<RunnerUp>,
}

impl Written {
    fn of(previous: &PreviousText) -> Self {
        let known = previous.runners_up.iter();
        let runners_up = known.map(|o| RunnerUp { place: o.place, token: o.token, probability: o.probability });
        Self { text: previous.text.clone(), runners_up: runners_up.collect() }
    }

    /// As the join holds it: each runner-up in 12 bytes, little-endian, their number in 4, then the text.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = u32::try_from(self.runners_up.len()).unwrap_or(0).to_le_bytes().to_vec();
        for other in &self.runners_up {
            bytes.extend([other.place, other.token, other.probability.to_bits()].map(u32::to_le_bytes).as_flattened());
        }
        bytes.extend(self.text.as_bytes());
        bytes
    }

    /// Runners-up and text of what [`Self::to_bytes`] made.
    fn parts(bytes: &[u8]) -> (&[u8], &[u8]) {
        let (count, rest) = bytes.split_first_chunk::<4>().unwrap_or((&[0; 4], bytes));
        let length = 12 * u32::from_le_bytes(*count) as usize;
        rest.split_at(length.min(rest.len()))
    }

    /// What [`Self::to_bytes`] made.
    fn from_bytes(bytes: &[u8]) -> Self {
        let (runners_up, text) = Self::parts(bytes);
        let (words, _) = runners_up.as_chunks::<4>();
        let (others, _) = words.as_chunks::<3>();
        let runners_up = others.iter().map(|other| {
            let [place, token, probability] = other.map(u32::from_le_bytes);
            RunnerUp { place, token, probability: f32::from_bits(probability) }
        });
        Self { runners_up: runners_up.collect(), text: String::from_utf8_lossy(text).into_owned() }
    }
}

/// The sampled texts of all groups of one kind.
#[derive(Debug)]
pub(crate) struct SampledKind {
    /// The samples per group, in the router's order.
    pub(crate) groups: Vec<Sample<Arc<Written>>>,
    /// Number of texts per group before sampling.
    pub(crate) offered: Vec<u64>,
}

/// Reads all texts and adds those that may be sampled to `join`.
pub(crate) async fn read<P>(previous: P, join: &mut Join, progress: Progress<'_>) -> Result<TextCounts, PoolsError>
where
    P: Stream<Item = Result<Vec<PreviousText>, ReadError>>,
{
    let mut counts = TextCounts::default();
    pin_mut!(previous);
    while let Some(batch) = previous.next().await {
        for previous in batch.map_err(PoolsError::Previous)? {
            counts.read += 1;
            if previous.text.trim().is_empty() {
                counts.empty += 1;
            } else if join.kinds().contains_key(&previous.kind) {
                join.push_text(previous.kind, &previous.id, &Written::of(&previous).to_bytes())?;
            } else {
                counts.of_other_kind += 1;
            }
        }
        progress(counts.read, None, "reading previous texts");
    }
    Ok(counts)
}

/// Samples a limited number of texts of each group.
#[derive(Debug)]
pub(crate) struct Sampler {
    seed: u64,
    pub(crate) kinds: BTreeMap<Kind, SampledKind>,
}

impl Sampler {
    /// Creates samples with only the group of everything.
    pub(crate) fn new(seed: u64, capacities: impl Iterator<Item = (Kind, usize)>) -> Self {
        let kinds = capacities.map(|(kind, capacity)| {
            let all = Sample::new(capacity);
            let (groups, offered) = (vec![all], vec![0]);
            (kind, SampledKind { groups, offered })
        });
        let kinds = kinds.collect();
        Self { seed, kinds }
    }

    /// Adds empty groups, up to `groups` of a kind in total.
    pub(crate) fn set_groups(&mut self, kind: Kind, groups: usize) {
        if let Some(sampled) = self.kinds.get_mut(&kind) {
            let capacity = sampled.groups[ALL].capacity();
            sampled.groups.resize(groups, Sample::new(capacity));
            sampled.offered.resize(groups, 0);
        }
    }

    /// Offers what the join holds of a text to the group of everything and to its entity's other groups.
    pub(crate) fn offer(&mut self, kind: Kind, id: &EntityId, text: &[u8], groups: impl Iterator<Item = usize>) {
        let Some(sampled) = self.kinds.get_mut(&kind) else {
            return;
        };
        let name = id.to_string();
        let priority = priority(self.seed, &[kind.as_str().as_bytes(), name.as_bytes(), Written::parts(text).1]);
        let mut shared: Option<Arc<Written>> = None;
        for group in groups.chain([ALL]) {
            sampled.offered[group] += 1;
            sampled.groups[group].offer(priority, || {
                let written = || Written::from_bytes(text).into();
                shared.get_or_insert_with(written).clone()
            });
        }
    }
}

/// Returns the tokens of all sampled texts, by the text's priority, without texts that have no token.
pub(crate) fn tokenise(
    samples: &BTreeMap<Kind, SampledKind>,
    tokenizer: &Tokenizer,
    progress: Progress<'_>,
) -> Result<HashMap<u128, PoolText>, PoolsError> {
    let groups = samples.values().flat_map(|sampled| &sampled.groups);
    let texts: BTreeMap<u128, &Arc<Written>> = groups.flat_map(Sample::iter).collect();
    let texts: Vec<(u128, &Written)> = texts.into_iter().map(|(p, text)| (p, &**text)).collect();
    let total = texts.len() as u64;
    let mut tokens = HashMap::with_capacity(texts.len());
    for batch in texts.chunks(TOKENISE_BATCH) {
        let inputs: Vec<&str> = batch.iter().map(|&(_, written)| written.text.as_str()).collect();
        let encodings = tokenizer.encode_batch_fast(inputs, false).map_err(PoolsError::Tokenizer)?;
        for (&(priority, written), encoding) in batch.iter().zip(encodings) {
            let text = PoolText { tokens: encoding.get_ids().to_vec(), runners_up: written.runners_up.clone() };
            tokens.insert(priority, text);
        }
        let done = tokens.len() as u64;
        progress(done, Some(total), "tokenising");
    }
    tokens.retain(|_, text| !text.tokens.is_empty());
    Ok(tokens)
}

impl SampledKind {
    /// Returns the tokens of a group's texts, in the order of the sample.
    pub(crate) fn tokens(&self, group: usize, of: &HashMap<u128, PoolText>) -> Vec<PoolText> {
        self.groups[group].iter().filter_map(|(priority, _)| of.get(&priority).cloned()).collect()
    }
}
