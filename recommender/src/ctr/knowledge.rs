//! Knowledge as features: vectors of texts, or ids.

use std::collections::BTreeMap;

/// A named set of knowledge for a model; without features it is the baseline.
#[derive(Debug, Default)]
pub struct Variant {
    /// The name in reports.
    pub name: String,
    /// Knowledge of users.
    pub user: Option<Feature>,
    /// Knowledge of items.
    pub item: Option<Feature>,
}

/// Knowledge of every user, or of every item.
#[derive(Debug)]
pub enum Feature {
    /// Dense vectors.
    Vectors(Vectors),
    /// Categorical ids.
    Codes(Codes),
}

impl Feature {
    /// Number of entities that have knowledge.
    pub fn known(&self) -> usize {
        match self {
            Self::Vectors(vectors) => vectors.known,
            Self::Codes(codes) => codes.known,
        }
    }
}

/// One vector per entity, standardised: over the entities that have one, every dimension has mean 0 and variance 1.
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

/// The ids are not a feature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodesError {
    /// Entities have different numbers of ids.
    #[error("entity {entity} has {found} knowledge ids, those before have {expected}: all need one for each codebook")]
    Length {
        /// Its index.
        entity: usize,
        /// Number for the entities before.
        expected: usize,
        /// Number for this entity.
        found: usize,
    },
}

impl Codes {
    /// Creates codes from rows per entity; each position of a list is the id of one codebook.
    ///
    /// # Errors
    /// [`CodesError::Length`] if lists differ in length.
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
                return Err(CodesError::Length { entity, expected: levels, found: row.len() });
            }
            for (level, &id) in row.iter().enumerate() {
                let next = u32::try_from(numbers.len() + 1).unwrap_or(u32::MAX);
                tokens.push(*numbers.entry((level, id)).or_insert(next));
            }
        }
        Ok(Self { levels, tokens, vocabulary: numbers.len() + 1, known: rows.iter().flatten().count() })
    }
}
