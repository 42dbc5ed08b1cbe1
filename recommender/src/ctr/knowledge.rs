//! Attributes and knowledge as features: bags of values, vectors of texts, or ids.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

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
    /// The values of one attribute.
    Bags(Bags),
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

/// The values of one attribute of each entity: any number of them, in no order.
///
/// A value that a single entity has says nothing about another one and is left out.
#[derive(Debug)]
pub struct Bags {
    /// The longest bag.
    pub(super) length: usize,
    /// Row-major tokens of `length`, 0 where a bag is shorter.
    pub(super) tokens: Vec<u32>,
    /// Likewise: one over the bag's size, 0 where it is shorter.
    pub(super) weights: Vec<f32>,
    /// The number of tokens, 0 included.
    pub(super) vocabulary: usize,
    known: usize,
}

impl Bags {
    /// One row of values per entity.
    pub fn new(rows: &[Vec<String>]) -> Self {
        let rows: Vec<HashSet<&String>> = rows.iter().map(|row| row.iter().collect()).collect();
        let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
        rows.iter().flatten().for_each(|value| *counts.entry(value).or_default() += 1);
        let shared = counts.into_iter().filter(|(_, count)| *count > 1);
        let numbers: BTreeMap<&String, u32> = shared.map(|(value, _)| value).zip(1..).collect();
        let bag = |row: HashSet<&String>| {
            let mut bag: Vec<u32> = row.into_iter().filter_map(|value| numbers.get(value).copied()).collect();
            bag.sort_unstable();
            bag
        };
        let bags: Vec<Vec<u32>> = rows.into_iter().map(bag).collect();
        let length = bags.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let (mut tokens, mut weights) = (Vec::new(), Vec::new());
        for bag in &bags {
            let weight = 1.0 / bag.len().max(1) as f32;
            tokens.extend((0..length).map(|place| bag.get(place).copied().unwrap_or(0)));
            weights.extend((0..length).map(|place| if place < bag.len() { weight } else { 0.0 }));
        }
        let known = bags.iter().filter(|bag| !bag.is_empty()).count();
        Self { length, tokens, weights, vocabulary: numbers.len() + 1, known }
    }
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
