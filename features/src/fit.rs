//! Fits a codebook to a sample of embeddings, from scratch or from the previous night's codebook.
//!
//! A codebook that starts from its parent's centroids keeps their order, so ids keep their meaning as far as the data
//! allow, and old and new centroids need no matching. If a new fit lowers the error on tonight's sample by less than
//! `refit_gain`, the parent's centroids stay unchanged, and only the ids of changed texts change.

use jiff::Timestamp;
use laser_schema::ids::{CODEBOOK_VERSION, CodebookInfo};
use laser_schema::{Digest, Kind, Progress};
use linfa_clustering::KMeansError;
use ndarray::{Array2, Axis, s};
use serde::{Deserialize, Serialize};

use crate::codebook::{Codebook, CodebookError, normalise, squared_norm};
use crate::kmeans::{lloyd, spread, subtract_nearest};

/// `[ids]`: the configuration of knowledge ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdsConfig {
    /// Number of ids per position.
    pub clusters: usize,
    /// Number of ids per part; each after the first describes what the ones before leave over.
    pub levels: usize,
    /// Number of equal parts that an embedding is cut into.
    pub codebooks: usize,
    /// Whether embeddings are scaled to length 1 first, so that the cosine decides the nearest centroid.
    pub normalise: bool,
    /// Number of embeddings to fit the centroids on.
    pub sample: usize,
    /// Seed for the sample and the first centroids.
    pub seed: u64,
    /// Most steps of k-means.
    pub iterations: u64,
    /// The previous night's codebook is kept unless a new fit lowers the mean squared distance by more than this share;
    /// 0 fits it every night, 1 never.
    pub refit_gain: f64,
}

impl Default for IdsConfig {
    fn default() -> Self {
        Self {
            clusters: 256,
            levels: 1,
            codebooks: 1,
            normalise: true,
            sample: 100_000,
            seed: 0,
            iterations: 50,
            refit_gain: 0.01,
        }
    }
}

impl IdsConfig {
    /// Checks what the types do not constrain.
    ///
    /// # Errors
    /// [`FitError::Config`].
    pub fn validate(&self) -> Result<(), FitError> {
        let checks = [
            ("clusters", self.clusters > 0, self.clusters.to_string(), "at least 1"),
            ("levels", self.levels > 0, self.levels.to_string(), "at least 1"),
            ("codebooks", self.codebooks > 0, self.codebooks.to_string(), "at least 1"),
            ("iterations", self.iterations > 0, self.iterations.to_string(), "at least 1"),
            ("sample", self.sample >= self.clusters, self.sample.to_string(), "at least [ids] clusters"),
            ("refit_gain", (0.0..=1.0).contains(&self.refit_gain), self.refit_gain.to_string(), "a share from 0 to 1"),
        ];
        let wrong = checks.into_iter().find(|(_, is_valid, ..)| !is_valid);
        wrong.map_or(Ok(()), |(key, _, value, expected)| Err(FitError::Config { key, value, expected }))
    }
}

/// The reasons why there is no codebook.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// A configured value is invalid.
    #[error("[ids] {key} = {value}: expected {expected}")]
    Config {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// Its range.
        expected: &'static str,
    },
    /// More clusters than embeddings.
    #[error(
        "[ids] clusters = {clusters}: there are only {found} {kind}s with an embedding; set clusters to at most {found}"
    )]
    TooFew {
        /// The kind.
        kind: Kind,
        /// The configured number.
        clusters: usize,
        /// Number of embeddings.
        found: usize,
    },
    /// Embeddings cannot be cut into equal parts.
    #[error("[ids] codebooks = {codebooks}: embeddings of {dimension} values cannot be cut into so many equal parts")]
    Cut {
        /// The configured number.
        codebooks: usize,
        /// Values of an embedding.
        dimension: usize,
    },
    /// The parent has another shape than the configuration or the embeddings.
    #[error(
        "the previous codebook {parent} has {what} {expected}, tonight it is {found}: its ids would mean something \
         else. Go back to {expected}, or begin anew with --previous none"
    )]
    OtherParent {
        /// Its digest.
        parent: Digest,
        /// The property that differs.
        what: &'static str,
        /// The parent's.
        expected: String,
        /// Tonight's.
        found: String,
    },
    /// The library failed.
    #[error("clustering {kind}s into {clusters} ids: {source}")]
    KMeans {
        /// The kind.
        kind: Kind,
        /// Number of clusters.
        clusters: usize,
        /// The library's error.
        source: KMeansError,
    },
    /// Centroids are not finite.
    #[error(transparent)]
    Codebook(#[from] CodebookError),
}

/// The inputs of fitting a codebook.
#[derive(Debug, Clone, Copy)]
pub struct FitInput<'a> {
    /// Users or items, for messages.
    pub kind: Kind,
    /// Embeddings, all finite and of one dimension.
    pub sample: &'a [&'a [f32]],
    /// Digest of the encoder that made them, if known.
    pub encoder: Option<&'a Digest>,
    /// The previous night's codebook and its digest.
    pub parent: Option<(&'a Codebook, &'a Digest)>,
    /// The current time, which becomes the codebook's.
    pub now: Timestamp,
}

/// Centroids, and the remainder of the sample.
struct Fitted {
    centroids: Vec<Vec<f32>>,
    /// Inertia per level.
    inertia: Vec<f64>,
    /// Unused ids per position.
    empty: Vec<u64>,
}

/// Fits a codebook; `progress` counts steps of k-means over all positions.
///
/// Memory: the sample twice more. Work: at most `iterations * sample * clusters * dimension * levels` multiplications.
pub fn fit(input: FitInput<'_>, config: &IdsConfig, progress: &mut dyn Progress) -> Result<Codebook, FitError> {
    check(&input, config)?;
    let points = points(input.sample, config.normalise);
    let fitted = fit_places(&points, input, config, progress)?;
    let parent = input.parent.map(|(parent, _)| parent);
    let kept = parent.map(|parent| measure(&points, parent));
    let error = |fitted: &Fitted| fitted.inertia.last().copied().unwrap_or_default();
    let kept = kept.filter(|kept| error(kept) - error(&fitted) <= config.refit_gain * error(kept));
    let is_kept = kept.is_some();
    let fitted = kept.unwrap_or(fitted);
    let drift = parent.map_or_else(Vec::new, |parent| drift(parent, &fitted.centroids));
    let info = CodebookInfo {
        version: CODEBOOK_VERSION,
        created: input.now,
        encoder: input.encoder.cloned(),
        parent: input.parent.map(|(_, digest)| digest.clone()),
        kept: is_kept,
        dimension: points.ncols(),
        normalise: config.normalise,
        codebooks: config.codebooks,
        levels: config.levels,
        clusters: config.clusters,
        seed: config.seed,
        fitted_on: points.nrows() as u64,
        variance: variance(&points),
        inertia: fitted.inertia,
        empty: fitted.empty,
        drift,
    };
    Ok(Codebook::new(info, fitted.centroids)?)
}

fn check(input: &FitInput<'_>, config: &IdsConfig) -> Result<(), FitError> {
    config.validate()?;
    let (clusters, codebooks) = (config.clusters, config.codebooks);
    let (kind, found) = (input.kind, input.sample.len());
    if found < clusters {
        return Err(FitError::TooFew { kind, clusters, found });
    }
    let dimension = input.sample.first().map_or(0, |e| e.len());
    if dimension == 0 || !dimension.is_multiple_of(codebooks) {
        return Err(FitError::Cut { codebooks, dimension });
    }
    let Some((parent, digest)) = input.parent else {
        return Ok(());
    };
    let info = parent.info();
    let encoder = |encoder: Option<&Digest>| encoder.map(ToString::to_string);
    let (theirs, ours) = (encoder(info.encoder.as_ref()), encoder(input.encoder));
    // An encoder that one side does not know is not a contradiction.
    let encoders = theirs.zip(ours).unwrap_or_default();
    let pairs = [
        ("embeddings of dimension", info.dimension.to_string(), dimension.to_string()),
        ("the encoder", encoders.0, encoders.1),
        ("[ids] clusters =", info.clusters.to_string(), clusters.to_string()),
        ("[ids] levels =", info.levels.to_string(), config.levels.to_string()),
        ("[ids] codebooks =", info.codebooks.to_string(), codebooks.to_string()),
        ("[ids] normalise =", info.normalise.to_string(), config.normalise.to_string()),
    ];
    match pairs.into_iter().find(|(_, theirs, ours)| theirs != ours) {
        None => Ok(()),
        Some((what, expected, found)) => Err(FitError::OtherParent { parent: digest.clone(), what, expected, found }),
    }
}

fn points(sample: &[&[f32]], is_normalised: bool) -> Array2<f32> {
    let dimension = sample.first().map_or(0, |e| e.len());
    let mut points = Array2::zeros((sample.len(), dimension));
    for (mut row, embedding) in points.rows_mut().into_iter().zip(sample) {
        for (value, given) in row.iter_mut().zip(*embedding) {
            *value = *given;
        }
        if let (true, Some(row)) = (is_normalised, row.as_slice_mut()) {
            normalise(row);
        }
    }
    points
}

/// Returns the part of all points that belongs to a codebook.
fn part(points: &Array2<f32>, codebook: usize, codebooks: usize) -> Array2<f32> {
    let length = points.ncols() / codebooks;
    let start = codebook * length;
    points.slice(s![.., start..start + length]).to_owned()
}

fn fit_places(
    points: &Array2<f32>,
    input: FitInput<'_>,
    config: &IdsConfig,
    progress: &mut dyn Progress,
) -> Result<Fitted, FitError> {
    let total = config.iterations * (config.codebooks * config.levels) as u64;
    let mut fitted = Fitted::empty(config.levels);
    for codebook in 0..config.codebooks {
        let mut points = part(points, codebook, config.codebooks);
        for level in 0..config.levels {
            let place = fitted.centroids.len();
            let first = match input.parent {
                Some((parent, _)) => matrix(parent.centroids(place), points.ncols()),
                None => spread(&points, config.clusters, config.seed.wrapping_add(place as u64)),
            };
            let before = place as u64 * config.iterations;
            let mut tell = |iteration, inertia| {
                progress.update(before + iteration, Some(total), &format!("mean squared distance {inertia:.4}"));
            };
            let centroids = lloyd(&points, first, config.iterations, &mut tell);
            let centroids =
                centroids.map_err(|source| FitError::KMeans { kind: input.kind, clusters: config.clusters, source })?;
            fitted.push(level, centroids.iter().copied().collect(), &mut points);
        }
    }
    Ok(fitted)
}

/// Measures what an existing codebook leaves of the sample.
fn measure(points: &Array2<f32>, codebook: &Codebook) -> Fitted {
    let info = codebook.info();
    let mut fitted = Fitted::empty(info.levels);
    for number in 0..info.codebooks {
        let mut points = part(points, number, info.codebooks);
        for level in 0..info.levels {
            let centroids = codebook.centroids(number * info.levels + level).to_vec();
            fitted.push(level, centroids, &mut points);
        }
    }
    fitted
}

impl Fitted {
    fn empty(levels: usize) -> Self {
        Self { centroids: Vec::new(), inertia: vec![0.0; levels], empty: Vec::new() }
    }

    /// Adds a position, and leaves in `points` what it does not represent.
    fn push(&mut self, level: usize, centroids: Vec<f32>, points: &mut Array2<f32>) {
        self.empty.push(subtract_nearest(points, &centroids));
        self.inertia[level] += mean_squared_norm(points);
        self.centroids.push(centroids);
    }
}

fn matrix(rows: &[f32], columns: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows.len() / columns, columns), |(r, c)| rows[r * columns + c])
}

fn mean_squared_norm(points: &Array2<f32>) -> f64 {
    let rows = points.rows().into_iter();
    let sum: f64 = rows.map(|row| row.as_slice().map_or(0.0, squared_norm)).sum();
    sum / points.nrows() as f64
}

fn variance(points: &Array2<f32>) -> f64 {
    let points = points.mapv(f64::from);
    let deviations = points.var_axis(Axis(0), 0.0);
    deviations.sum()
}

fn drift(parent: &Codebook, centroids: &[Vec<f32>]) -> Vec<f64> {
    let rms = |(place, now): (usize, &Vec<f32>)| {
        let pairs = now.iter().zip(parent.centroids(place));
        let sum: f64 = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
        (sum / parent.info().clusters as f64).sqrt()
    };
    centroids.iter().enumerate().map(rms).collect()
}
