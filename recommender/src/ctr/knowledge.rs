//! Attributes and knowledge as features: bags of values, vectors of texts, or ids.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// A word of fewer texts is left out: it says little about others.
const TEXTS_OF_A_WORD: usize = 3;

/// A named choice of features; without any it is the baseline.
#[derive(Debug, Clone, Default)]
pub struct Variant {
    /// The name in reports.
    pub name: String,
    /// Features of users, and features of items.
    pub features: [Vec<Arc<Feature>>; 2],
}

/// One feature of every user, or of every item.
#[derive(Debug)]
pub enum Feature {
    /// Dense vectors.
    Vectors(Vectors),
    /// Categorical ids.
    Codes(Codes),
    /// The values of one attribute, or the words of a text.
    Bags(Arc<Bags>),
}

impl Feature {
    /// Number of entities that have knowledge.
    pub fn known(&self) -> usize {
        match self {
            Self::Vectors(vectors) => vectors.known,
            Self::Codes(codes) => codes.known,
            Self::Bags(bags) => bags.known,
        }
    }
}

/// The values of one attribute, or the words of a text, of each entity: any number of them, in no order.
#[derive(Debug)]
pub struct Bags {
    /// By entity, where its tokens end.
    pub(super) ends: Vec<usize>,
    /// Each token and its weight.
    pub(super) tokens: Vec<(u32, f32)>,
    /// The number of different tokens.
    pub(super) vocabulary: usize,
    known: usize,
}

impl Bags {
    /// One row of values per entity, of equal weights that sum to one. A value that a single entity has says nothing
    /// about another one and is left out.
    pub fn of_values(rows: &[Vec<String>]) -> Self {
        Self::new(rows, 2, |bag, _| {
            let weight = 1.0 / bag.len() as f32;
            bag.values_mut().for_each(|value| *value = weight);
        })
    }

    /// One text per entity: the weights of its words are tf-idf, (1 + ln n) · ln(N / N_w), as a vector of length one.
    /// Words of fewer than three texts are left out.
    pub fn of_texts(texts: &[Option<String>]) -> Self {
        let rows: Vec<Vec<String>> = texts.iter().map(|text| words(text.as_deref().unwrap_or_default())).collect();
        let all = texts.iter().flatten().count() as f32;
        Self::new(&rows, TEXTS_OF_A_WORD, |bag, texts_of| {
            for (token, weight) in bag.iter_mut() {
                *weight = (1.0 + weight.ln()) * (all / texts_of[*token as usize]).ln();
            }
            let norm = bag.values().map(|weight| weight * weight).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
            bag.values_mut().for_each(|weight| *weight /= norm);
        })
    }

    /// Bags of the values that at least `least` rows have. `weigh` turns counts within a row into weights, given the
    /// number of rows that have each token.
    fn new(rows: &[Vec<String>], least: usize, weigh: impl Fn(&mut BTreeMap<u32, f32>, &[f32])) -> Self {
        let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
        for row in rows {
            row.iter().collect::<HashSet<_>>().into_iter().for_each(|value| *counts.entry(value).or_default() += 1);
        }
        counts.retain(|_, count| *count >= least);
        let rows_of: Vec<f32> = counts.values().map(|count| *count as f32).collect();
        let numbers: BTreeMap<&String, u32> = counts.into_keys().zip(0..).collect();
        let (mut ends, mut tokens, mut known) = (Vec::new(), Vec::new(), 0);
        for row in rows {
            let mut bag: BTreeMap<u32, f32> = BTreeMap::new();
            row.iter().filter_map(|value| numbers.get(value)).for_each(|token| *bag.entry(*token).or_default() += 1.0);
            weigh(&mut bag, &rows_of);
            known += usize::from(!bag.is_empty());
            tokens.extend(bag);
            ends.push(tokens.len());
        }
        Self { ends, tokens, vocabulary: rows_of.len(), known }
    }

    /// The tokens and weights of an entity.
    pub(super) fn bag(&self, entity: usize) -> &[(u32, f32)] {
        let begin = entity.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.tokens[begin..self.ends[entity]]
    }
}

/// The words of a text in lower case: letters and digits, and apostrophes between them.
fn words(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '\'');
    words.map(|word| word.trim_matches('\'').to_lowercase()).filter(|word| !word.is_empty()).collect()
}

/// A vector for each entity, standardised: over the entities that have one, every dimension has mean 0 and variance 1.
///
/// Sentence encoders put all texts of a kind near each other, and their differences are small compared with what they
/// share. An entity without a vector has zeros, which is the mean.
#[derive(Debug)]
pub struct Vectors {
    /// Values of a vector.
    pub(super) dimension: usize,
    /// Row-major.
    pub(super) values: Vec<f32>,
    known: usize,
}

impl Vectors {
    /// Creates vectors from rows per entity, all of `dimension` values.
    pub fn new(dimension: usize, rows: &[Option<Vec<f32>>]) -> Self {
        let known: Vec<&Vec<f32>> = rows.iter().flatten().collect();
        let count = known.len().max(1) as f64;
        let mut moments = vec![(0.0, 0.0); dimension];
        for row in &known {
            for ((sum, squares), &value) in moments.iter_mut().zip(*row) {
                *sum += f64::from(value);
                *squares += f64::from(value).powi(2);
            }
        }
        for (mean, scale) in &mut moments {
            *mean /= count;
            let variance = *scale / count - *mean * *mean;
            // A constant dimension carries no information.
            *scale = if variance > 1e-12 { 1.0 / variance.sqrt() } else { 0.0 };
        }
        let mut values = Vec::with_capacity(rows.len() * dimension);
        for row in rows {
            match row {
                Some(row) => values.extend(row.iter().zip(&moments).map(standard)),
                None => values.resize(values.len() + dimension, 0.0),
            }
        }
        Self { dimension, values, known: known.len() }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "features are single precision")]
fn standard((value, (mean, scale)): (&f32, &(f64, f64))) -> f32 {
    ((f64::from(*value) - mean) * scale) as f32
}

/// Ids per entity, one per codebook.
#[derive(Debug)]
pub struct Codes {
    /// Number of ids per entity.
    pub(super) levels: usize,
    /// Row-major: 0 if there is none, otherwise the number of the codebook's id among all ids of all codebooks.
    pub(super) tokens: Vec<u32>,
    /// Number of tokens, including 0.
    pub(super) vocabulary: usize,
    known: usize,
}

/// An entity whose ids are more or fewer than those of the entities before.
#[derive(Debug, thiserror::Error)]
#[error("entity {entity} has {found} knowledge ids, those before have {expected}: all need one for each codebook")]
pub struct CodesError {
    /// Its index.
    pub entity: usize,
    expected: usize,
    found: usize,
}

impl Codes {
    /// Creates codes from rows per entity; each position of a list is the id of one codebook.
    ///
    /// # Errors
    /// [`CodesError`] if lists differ in length.
    pub fn new(rows: &[Option<Vec<i64>>]) -> Result<Self, CodesError> {
        let levels = rows.iter().flatten().map(Vec::len).next().unwrap_or(0);
        let mut numbers: BTreeMap<(usize, i64), u32> = BTreeMap::new();
        let mut tokens = Vec::with_capacity(rows.len() * levels);
        for (entity, row) in rows.iter().enumerate() {
            let Some(row) = row else {
                tokens.resize(tokens.len() + levels, 0);
                continue;
            };
            if row.len() != levels {
                return Err(CodesError { entity, expected: levels, found: row.len() });
            }
            for (level, &id) in row.iter().enumerate() {
                let next = u32::try_from(numbers.len() + 1).unwrap_or(u32::MAX);
                tokens.push(*numbers.entry((level, id)).or_insert(next));
            }
        }
        Ok(Self { levels, tokens, vocabulary: numbers.len() + 1, known: rows.iter().flatten().count() })
    }
}
