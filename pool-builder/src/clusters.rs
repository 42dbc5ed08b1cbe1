//! Collaborative groups (LASER 3.2): k-means over embeddings.
//!
//! The number of clusters is given, or is the candidate with the highest mean simplified silhouette: (b − a) / max(a,
//! b), where a is the distance of an embedding to its own centroid and b the distance to the next nearest. This costs
//! O(n · k) where the full silhouette costs O(n²). Ties take the smaller k.
//!
//! Initial centroids are k-means++. linfa's k-means|| is not offered: it seeds a generator per part of its parallel
//! loop, so its result depends on how threads split the work.

use laser_schema::Kind;
use linfa::DatasetBase;
use linfa::traits::Fit;
use linfa_clustering::{KMeans, KMeansInit};
use ndarray::{Array2, ArrayView1, s};
use rand_xoshiro::Xoshiro256Plus;
use rand_xoshiro::rand_core::SeedableRng;
use serde::{Deserialize, Serialize};

use crate::config::{Clusters, KMeansConfig};
use crate::error::PoolsError;

/// The outcome of clustering one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Clustering {
    /// The number of clusters used.
    pub k: usize,
    /// Number of embeddings that the centroids were fitted on.
    pub fitted_on: usize,
    /// All numbers of clusters that were tried, in ascending order.
    pub candidates: Vec<ClusterCandidate>,
}

/// One number of clusters that was tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterCandidate {
    /// The number.
    pub k: usize,
    /// Mean squared distance to the nearest centroid.
    pub inertia: f64,
    /// Mean simplified silhouette, from −1 to 1; none for one cluster.
    pub silhouette: Option<f64>,
}

/// Fits centroids to `embeddings`, which are all finite and of one dimension. Returns them in single precision, because
/// routing uses it.
pub(crate) fn fit(
    embeddings: &[&[f32]],
    clusters: Clusters,
    config: &KMeansConfig,
    seed: u64,
    kind: Kind,
) -> Result<(Vec<Vec<f32>>, Clustering), PoolsError> {
    let found = embeddings.len();
    let candidates = clusters.candidates();
    if *candidates.end() > found {
        return Err(PoolsError::Input(format!(
            "[pools.{kind}] clusters = {clusters}: only {found} {kind}s can be clustered (embedding, enough \
             interactions, within [pools.kmeans] fit_sample); set clusters to at most {found}"
        )));
    }
    let dimension = embeddings.first().map_or(0, |e| e.len());
    let matrix = Array2::from_shape_fn((found, dimension), |(row, i)| f64::from(embeddings[row][i]));
    let dataset = DatasetBase::from(matrix);
    let mut tried: Vec<(ClusterCandidate, Array2<f64>)> = Vec::new();
    for k in candidates {
        let model = KMeans::params_with_rng(k, Xoshiro256Plus::seed_from_u64(seed))
            .n_runs(config.runs)
            .tolerance(config.tolerance)
            .max_n_iterations(config.max_iterations)
            .init_method(KMeansInit::KMeansPlusPlus)
            .fit(&dataset)
            .map_err(|error| PoolsError::Input(format!("clustering {kind}s into {k} groups: {error}")))?;
        let sample = dataset.records().slice(s![..found.min(config.silhouette_sample), ..]);
        let silhouette = silhouette(sample.rows(), model.centroids());
        let candidate = ClusterCandidate { k, inertia: model.inertia(), silhouette };
        tried.push((candidate, model.centroids().clone()));
    }
    let score = |(candidate, _): &&(ClusterCandidate, _)| candidate.silhouette.unwrap_or(-1.0);
    let best = tried.iter().rev().max_by(|a, b| score(a).total_cmp(&score(b)));
    let (k, centroids) = best.map_or((0, Vec::new()), |(c, centroids)| (c.k, single(centroids)));
    let candidates = tried.into_iter().map(|(candidate, _)| candidate).collect();
    Ok((centroids, Clustering { k, fitted_on: found, candidates }))
}

fn single(centroids: &Array2<f64>) -> Vec<Vec<f32>> {
    #[expect(clippy::cast_possible_truncation, reason = "routing is in single precision")]
    let row = |row: ArrayView1<f64>| row.iter().map(|&value| value as f32).collect();
    centroids.rows().into_iter().map(row).collect()
}

fn silhouette<'a>(sample: impl IntoIterator<Item = ArrayView1<'a, f64>>, centroids: &Array2<f64>) -> Option<f64> {
    if centroids.nrows() < 2 {
        return None;
    }
    let (mut sum, mut count) = (0.0, 0.0);
    for embedding in sample {
        let (mut own, mut next) = (f64::INFINITY, f64::INFINITY);
        for centroid in centroids.rows() {
            let difference = &embedding - &centroid;
            let distance = difference.dot(&difference).sqrt();
            (own, next) = (own.min(distance), next.min(own.max(distance)));
        }
        sum += if next > 0.0 { (next - own) / next } else { 0.0 };
        count += 1.0;
    }
    Some(sum / count)
}

/// Returns the centroid nearest to `embedding`, the first of ties; none if the dimension differs or a value is not
/// finite.
pub(crate) fn nearest(centroids: &[Vec<f32>], embedding: &[f32]) -> Option<usize> {
    if !embedding.iter().all(|value| value.is_finite()) {
        return None;
    }
    let distance = |centroid: &[f32]| -> f64 {
        let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
        centroid.iter().zip(embedding).map(square).sum()
    };
    (0..centroids.len())
        .filter(|&c| centroids[c].len() == embedding.len())
        .min_by(|&a, &b| distance(&centroids[a]).total_cmp(&distance(&centroids[b])))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use laser_schema::sample::priority;

    /// `n` points around each of `k` centres that are 10 apart, within 1 of them, interleaved.
    pub(crate) fn planted(k: usize, n: usize) -> Vec<Vec<f32>> {
        let jitter = |i: usize, axis: u8| {
            let low = priority(u64::from(axis), &[&i.to_le_bytes()]) % 1000;
            u16::try_from(low).map(f32::from).unwrap() / 1000.0
        };
        let centre = |c: usize| 10.0 * f32::from(u8::try_from(c).unwrap());
        (0..k * n).map(|i| vec![centre(i % k) + jitter(i, 0), -centre(i % k) + jitter(i, 1)]).collect()
    }

    fn fit_planted(k: usize, clusters: Clusters, seed: u64) -> (Vec<Vec<f32>>, Clustering) {
        let points = planted(k, 40);
        let views: Vec<&[f32]> = points.iter().map(Vec::as_slice).collect();
        fit(&views, clusters, &KMeansConfig::default(), seed, Kind::User).unwrap()
    }

    #[test]
    fn planted_clusters_are_separated_and_reproducible() {
        let (centroids, clustering) = fit_planted(4, Clusters::Fixed(4), 1);
        assert_eq!((clustering.k, clustering.fitted_on), (4, 160));
        let cluster: Vec<_> = planted(4, 40).iter().map(|p| nearest(&centroids, p)).collect();
        for i in 0..cluster.len() {
            assert_eq!(cluster[i], cluster[i % 4], "point {i}");
        }
        assert_eq!((0..4).filter(|c| cluster[..4].contains(&Some(*c))).count(), 4);
        assert_eq!(fit_planted(4, Clusters::Fixed(4), 1), (centroids, clustering));
    }

    #[test]
    fn range_finds_the_planted_number() {
        for k in 2..=6 {
            let (centroids, clustering) = fit_planted(k, Clusters::Range { min: 2, max: 8 }, 7);
            assert_eq!((clustering.k, centroids.len()), (k, k), "{clustering:?}");
            assert_eq!(clustering.candidates.len(), 7);
        }
    }

    #[test]
    fn more_clusters_than_entities_are_refused() {
        let points = planted(3, 1);
        let views: Vec<&[f32]> = points.iter().map(Vec::as_slice).collect();
        for clusters in [Clusters::Fixed(4), Clusters::Range { min: 2, max: 4 }] {
            let error = fit(&views, clusters, &KMeansConfig::default(), 0, Kind::Item).unwrap_err();
            let message = error.to_string();
            assert!(message.contains("[pools.item] clusters"), "{message}");
            assert!(message.contains("only 3 items"), "{message}");
        }
    }

    #[test]
    fn identical_embeddings_cluster_without_failing() {
        let same: &[f32] = &[1.0, 2.0];
        let (centroids, clustering) =
            fit(&[same; 5], Clusters::Fixed(3), &KMeansConfig::default(), 0, Kind::User).unwrap();
        assert_eq!(nearest(&centroids, same), Some(0));
        assert_eq!(clustering.candidates[0].silhouette, Some(0.0));
    }

    #[test]
    fn unusable_embeddings_have_no_nearest_centroid() {
        let centroids = [vec![0.0, 0.0], vec![1.0, 1.0]];
        assert_eq!(nearest(&centroids, &[0.9, 0.8]), Some(1));
        assert_eq!(nearest(&centroids, &[0.5, 0.5]), Some(0));
        assert_eq!(nearest(&centroids, &[0.9]), None);
        assert_eq!(nearest(&centroids, &[0.9, f32::NAN]), None);
        assert_eq!(nearest(&[], &[0.9]), None);
    }
}
