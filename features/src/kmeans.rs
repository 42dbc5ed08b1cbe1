//! K-means for codebooks: spread or given first centroids, and linfa's Lloyd iterations.
//!
//! The first centroids are k-means++ with one pass per centroid. linfa's own compares with all earlier centroids in
//! each pass, which for 256 of them is 128 times the work. A centroid that is nearest to nothing moves to the point
//! that is represented worst, so that none is lost over many nights. Everything is a function of points, first
//! centroids and seed, whatever the number of threads.

use linfa::DatasetBase;
use linfa::traits::Fit;
use linfa_clustering::{KMeans, KMeansError, KMeansInit};
use ndarray::Array2;
use rand_xoshiro::Xoshiro256Plus;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use rayon::prelude::*;

use crate::codebook::{nearest, squared_distance, subtract};

/// Iterations end once one lowers the mean squared distance by less than this share.
const TOLERANCE: f32 = 1e-4;

/// Spreads centroids over `points` by k-means++ (Arthur and Vassilvitskii 2007): each next one is a point drawn with
/// probability proportional to its squared distance to the nearest one so far. O(k · points · dimension).
pub(crate) fn spread(points: &Array2<f32>, k: usize, seed: u64) -> Array2<f32> {
    let mut rng = Xoshiro256Plus::seed_from_u64(seed);
    let (values, length) = (values(points), points.ncols());
    let mut distances = vec![f32::INFINITY; points.nrows()];
    let mut centroids = Array2::zeros((k, points.ncols()));
    for mut centroid in centroids.rows_mut() {
        let chosen = draw(&distances, &mut rng);
        centroid.assign(&points.row(chosen));
        let chosen = &values[chosen * length..][..length];
        let rows = values.par_chunks_exact(length).zip(&mut distances);
        rows.for_each(|(point, distance)| {
            *distance = distance.min(squared_distance(chosen, point));
        });
    }
    centroids
}

/// Draws an index with probability proportional to its weight; any index if weights are all infinite or all zero.
fn draw(weights: &[f32], rng: &mut Xoshiro256Plus) -> usize {
    // 53 random bits make a double from 0 to 1.
    let share = (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    let weight = |weight: &f32| {
        if weight.is_finite() { f64::from(*weight) } else { 1.0 }
    };
    let total: f64 = weights.iter().map(weight).sum();
    let mut left = share * total;
    let found = weights.iter().position(|w| {
        left -= weight(w);
        left < 0.0
    });
    found.unwrap_or(0)
}

/// Moves `centroids` to a local minimum of the mean squared distance of `points` to their nearest one, in at most
/// `iterations` steps. After each step it reports to `progress` the step and the mean squared distance before it.
pub(crate) fn lloyd(
    points: &Array2<f32>,
    mut centroids: Array2<f32>,
    iterations: u64,
    progress: &mut dyn FnMut(u64, f64),
) -> Result<Array2<f32>, KMeansError> {
    let dataset = DatasetBase::from(points.view());
    let mut last = f32::INFINITY;
    for iteration in 1..=iterations {
        let rng = Xoshiro256Plus::seed_from_u64(0);
        let model = KMeans::params_with_rng(centroids.nrows(), rng)
            .n_runs(1)
            .max_n_iterations(1)
            .init_method(KMeansInit::Precomputed(centroids))
            .fit(&dataset)?;
        centroids = model.centroids().clone();
        let inertia = model.inertia();
        progress(iteration, f64::from(inertia));
        let has_empty = model.cluster_count().iter().any(|count| *count == 0.0);
        let is_moved = has_empty && relocate_empty(points, &mut centroids);
        if !is_moved && last - inertia <= TOLERANCE * inertia {
            break;
        }
        last = inertia;
    }
    Ok(centroids)
}

/// Moves each centroid that is nearest to no point to one of the points farthest from their own, and returns whether
/// there were any. If all points are at a centroid it stays.
fn relocate_empty(points: &Array2<f32>, centroids: &mut Array2<f32>) -> bool {
    let owners = owners(points, centroids);
    let mut is_empty = vec![true; centroids.nrows()];
    owners.iter().for_each(|(owner, _)| is_empty[*owner] = false);
    let empty = (0..is_empty.len()).filter(|centroid| is_empty[*centroid]);
    let mut worst: Vec<usize> = (0..owners.len()).filter(|p| owners[*p].1 > 0.0).collect();
    worst.sort_by(|a, b| owners[*b].1.total_cmp(&owners[*a].1).then(a.cmp(b)));
    let mut is_moved = false;
    for (centroid, point) in empty.zip(worst) {
        centroids.row_mut(centroid).assign(&points.row(point));
        is_moved = true;
    }
    is_moved
}

/// Returns the nearest centroid of each point and its squared distance.
fn owners(points: &Array2<f32>, centroids: &Array2<f32>) -> Vec<(usize, f32)> {
    let rows = values(points).par_chunks_exact(points.ncols());
    rows.map(|point| nearest(values(centroids), point)).collect()
}

/// Subtracts from each point its nearest centroid, and returns the number of centroids nearest to none.
pub(crate) fn subtract_nearest(points: &mut Array2<f32>, centroids: &[f32]) -> u64 {
    let length = points.ncols();
    let values = points.as_slice_mut().unwrap_or_default();
    let rows = values.par_chunks_exact_mut(length);
    let owners: Vec<usize> = rows
        .map(|point| {
            let (nearest, _) = nearest(centroids, point);
            subtract(point, &centroids[nearest * length..][..length]);
            nearest
        })
        .collect();
    let mut is_empty = vec![true; centroids.len() / length];
    owners.into_iter().for_each(|owner| is_empty[owner] = false);
    is_empty.into_iter().filter(|empty| *empty).count() as u64
}

/// Returns all values row by row; every matrix here has that order.
fn values(matrix: &Array2<f32>) -> &[f32] {
    matrix.as_slice().unwrap_or_default()
}
