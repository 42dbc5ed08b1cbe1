//! Codebooks as `laser ids` uses them: fitted, begun with that of the night before, stored, read.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use laser_features::{Codebook, CodebookError, FitError, FitInput, IdsConfig, fit};
use laser_schema::sample::priority;
use laser_schema::{Digest, EntityId, Kind};
use proptest::prelude::*;

/// A value from -1 to 1 that depends on all of its arguments alone.
fn noise(seed: u64, row: usize, column: usize) -> f32 {
    let hash = priority(seed, &[&row.to_le_bytes(), &column.to_le_bytes()]) % 20_001;
    f32::from(i16::try_from(hash).unwrap_or_default() - 10_000) / 10_000.0
}

/// Embeddings around `centres` directions with noise around each, as texts of a few themes have them.
fn embeddings(seed: u64, rows: usize, dimension: usize, centres: usize) -> Vec<Vec<f32>> {
    let value = |row: usize, column| noise(1, row % centres, column) + 0.5 * noise(seed, row, column);
    let row = |row| (0..dimension).map(|column| value(row, column)).collect();
    (0..rows).map(row).collect()
}

fn config(clusters: usize) -> IdsConfig {
    IdsConfig { clusters, ..IdsConfig::default() }
}

fn try_fit(sample: &[Vec<f32>], config: &IdsConfig, parent: Option<&Codebook>) -> Result<Codebook, FitError> {
    let sample: Vec<&[f32]> = sample.iter().map(Vec::as_slice).collect();
    let digest = Digest::of(b"parent");
    let input = FitInput {
        kind: Kind::User,
        sample: &sample,
        encoder: None,
        parent: parent.map(|parent| (parent, &digest)),
        now: "2026-01-02T03:04:05Z".parse().unwrap(),
    };
    fit(input, config, &mut ())
}

fn fitted(sample: &[Vec<f32>], config: &IdsConfig, parent: Option<&Codebook>) -> Codebook {
    try_fit(sample, config, parent).unwrap()
}

fn ids(codebook: &Codebook, embedding: &[f32]) -> Vec<i64> {
    codebook.code(&EntityId::Int(0), embedding).unwrap().ids
}

/// Share of the embeddings with any other id.
fn churn(before: &Codebook, now: &Codebook, pairs: &[(&Vec<f32>, &Vec<f32>)]) -> f64 {
    let changed = pairs.iter().filter(|(a, b)| ids(before, a) != ids(now, b));
    changed.count() as f64 / pairs.len() as f64
}

fn same(embeddings: &[Vec<f32>]) -> Vec<(&Vec<f32>, &Vec<f32>)> {
    embeddings.iter().map(|e| (e, e)).collect()
}

#[test]
fn planted_clusters_have_ids_of_their_own() {
    let sample = embeddings(7, 200, 16, 5);
    let codebook = fitted(&sample, &config(5), None);
    for (row, embedding) in sample.iter().enumerate() {
        assert_eq!(ids(&codebook, embedding), ids(&codebook, &sample[row % 5]), "row {row}");
    }
    let distinct: std::collections::HashSet<_> = sample[..5].iter().map(|e| ids(&codebook, e)).collect();
    assert_eq!(distinct.len(), 5);
    let info = codebook.info();
    assert!(info.inertia[0] < 0.3 * info.variance, "{info:?}");
    assert_eq!(info.empty, [0]);
}

#[test]
fn each_level_and_each_codebook_lowers_the_error() {
    let sample = embeddings(3, 400, 16, 40);
    let levels = fitted(&sample, &IdsConfig { levels: 4, ..config(8) }, None);
    let inertia = &levels.info().inertia;
    assert!(inertia.is_sorted_by(|a, b| a > b), "{inertia:?}");
    assert!(levels.info().variance > inertia[0]);
    let one = fitted(&sample, &config(8), None);
    let cut = fitted(&sample, &IdsConfig { codebooks: 4, ..config(8) }, None);
    assert!(cut.info().inertia[0] < one.info().inertia[0]);
    assert_eq!(ids(&levels, &sample[0]).len(), 4);
    assert_eq!(ids(&cut, &sample[0]).len(), 4);
    let both = fitted(&sample, &IdsConfig { codebooks: 2, levels: 3, ..config(8) }, None);
    assert_eq!(ids(&both, &sample[0]).len(), 6);
    assert!(both.info().inertia.is_sorted_by(|a, b| a > b));
}

#[test]
fn the_distortion_of_the_sample_is_the_inertia() {
    let sample = embeddings(3, 300, 12, 20);
    let config = IdsConfig { levels: 2, codebooks: 3, ..config(10) };
    let codebook = fitted(&sample, &config, None);
    let of = |e: &Vec<f32>| codebook.code(&EntityId::Int(0), e).unwrap().distortion;
    let mean = sample.iter().map(of).sum::<f64>() / sample.len() as f64;
    let inertia = codebook.info().inertia[1];
    assert!((mean - inertia).abs() < 1e-6, "{mean} {inertia}");
}

#[test]
fn a_codebook_begun_with_its_own_changes_no_id_of_the_same_texts() {
    let sample = embeddings(5, 600, 24, 60);
    for config in
        [config(32), IdsConfig { levels: 3, ..config(16) }, IdsConfig { codebooks: 2, levels: 2, ..config(16) }]
    {
        let first = fitted(&sample, &config, None);
        let second = fitted(&sample, &config, Some(&first));
        assert!(second.info().kept);
        assert_eq!(churn(&first, &second, &same(&sample)).to_bits(), 0.0_f64.to_bits());
        assert!(second.info().drift.iter().all(|drift| *drift == 0.0));
        assert_eq!(second.info().parent, Some(Digest::of(b"parent")));
    }
}

#[test]
fn warm_starts_churn_less_than_cold_ones_when_texts_change_a_little() {
    let yesterday = embeddings(5, 1200, 24, 60);
    // One text in ten is another; the others are as they were.
    let other = embeddings(6, 1200, 24, 60);
    let tonight: Vec<Vec<f32>> =
        (0..1200).map(|row| if row % 10 == 0 { &other } else { &yesterday }[row].clone()).collect();
    let pairs: Vec<_> = yesterday.iter().zip(&tonight).collect();
    let always = IdsConfig { refit_gain: 0.0, ..config(32) };
    let first = fitted(&yesterday, &always, None);
    let kept = fitted(&tonight, &config(32), Some(&first));
    let refitted = fitted(&tonight, &always, Some(&first));
    let cold = fitted(&tonight, &IdsConfig { seed: 9, ..always.clone() }, None);
    let [kept_churn, warm, cold] = [&kept, &refitted, &cold].map(|now| churn(&first, now, &pairs));
    assert!(kept.info().kept && !refitted.info().kept);
    // Only texts that changed can have another id if centroids stay.
    assert!(kept_churn <= 0.1, "{kept_churn}");
    assert!(warm < 0.2, "{warm}");
    assert!(cold > 0.5 && cold > 2.0 * warm, "cold {cold}, warm {warm}");
}

#[test]
fn texts_that_became_others_are_fitted_again() {
    let config = config(16);
    let first = fitted(&embeddings(5, 400, 24, 16), &config, None);
    let others: Vec<Vec<f32>> =
        (0..400).map(|row| (0..24).map(|c| noise(11, row % 16, c) + 0.1 * noise(12, row, c)).collect()).collect();
    let second = fitted(&others, &config, Some(&first));
    assert!(!second.info().kept);
    assert!(second.info().drift[0] > 0.1, "{:?}", second.info().drift);
    assert_eq!(second.info().empty, [0], "centroids that represent nothing are moved");
}

#[test]
fn fewer_distinct_texts_than_ids_leave_some_unused() {
    let sample: Vec<Vec<f32>> = (0..20_u8).map(|row| vec![f32::from(row % 3), 1.0]).collect();
    let codebook = fitted(&sample, &config(8), None);
    assert_eq!(codebook.info().empty, [5]);
    let again = fitted(&sample, &config(8), Some(&codebook));
    assert_eq!(churn(&codebook, &again, &same(&sample)).to_bits(), 0.0_f64.to_bits());
}

#[test]
fn zeros_have_ids_too() {
    let sample = vec![vec![0.0, 0.0], vec![1.0, 0.0], vec![0.0, 2.0]];
    let codebook = fitted(&sample, &config(3), None);
    assert_eq!(ids(&codebook, &[0.0, 3.0]), ids(&codebook, &sample[2]));
    assert_ne!(ids(&codebook, &sample[0]), ids(&codebook, &sample[1]));
}

#[test]
fn what_cannot_be_fitted_is_refused_with_what_to_do() {
    let sample = embeddings(1, 9, 6, 3);
    let cases = [
        (config(10), "clusters = 10: there are only 9 users with an embedding; set clusters to at most 9"),
        (config(0), "[ids] clusters = 0: expected at least 1"),
        (IdsConfig { levels: 0, ..config(3) }, "[ids] levels = 0"),
        (IdsConfig { iterations: 0, ..config(3) }, "[ids] iterations = 0"),
        (IdsConfig { sample: 2, ..config(3) }, "[ids] sample = 2: expected at least [ids] clusters"),
        (IdsConfig { refit_gain: 1.5, ..config(3) }, "[ids] refit_gain = 1.5: expected a share"),
        (IdsConfig { codebooks: 4, ..config(3) }, "codebooks = 4: embeddings of 6 values cannot be cut"),
    ];
    for (config, expected) in cases {
        let error = try_fit(&sample, &config, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
}

#[test]
fn a_parent_of_another_shape_is_refused_with_what_to_do() {
    let sample = embeddings(1, 9, 6, 3);
    let good = fitted(&sample, &config(3), None);
    let cases = [
        (config(4), "has [ids] clusters = 3, tonight it is 4"),
        (IdsConfig { levels: 2, ..config(3) }, "has [ids] levels = 1, tonight it is 2"),
        (IdsConfig { normalise: false, ..config(3) }, "normalise = true, tonight it is false"),
    ];
    for (config, expected) in cases {
        let error = try_fit(&sample, &config, Some(&good)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
    let wider = embeddings(1, 9, 8, 3);
    let error = try_fit(&wider, &config(3), Some(&good)).unwrap_err().to_string();
    assert!(error.contains("has embeddings of dimension 6, tonight it is 8"), "{error}");
    assert!(error.contains("--previous none"), "{error}");
}

#[test]
fn another_encoder_than_the_parents_is_refused() {
    let sample = embeddings(1, 9, 6, 3);
    let views: Vec<&[f32]> = sample.iter().map(Vec::as_slice).collect();
    let (one, two) = (Digest::of(b"one"), Digest::of(b"two"));
    let input = FitInput {
        kind: Kind::Item,
        sample: &views,
        encoder: Some(&one),
        parent: None,
        now: "2026-01-02T03:04:05Z".parse().unwrap(),
    };
    let first = fit(input, &config(3), &mut ()).unwrap();
    assert_eq!(first.info().encoder, Some(one.clone()));
    let with = |encoder| {
        let parent = Some((&first, &one));
        let input = FitInput { encoder, parent, ..input };
        fit(input, &config(3), &mut ())
    };
    assert!(with(Some(&one)).is_ok());
    assert!(with(None).is_ok(), "an encoder that is not told is no contradiction");
    let error = with(Some(&two)).unwrap_err().to_string();
    assert!(error.contains("has the encoder") && error.contains(two.as_str()), "{error}");
}

#[test]
fn unusable_embeddings_have_no_ids() {
    let codebook = fitted(&embeddings(1, 9, 6, 3), &config(3), None);
    let id = EntityId::Text("u/1".into());
    let short = codebook.code(&id, &[1.0; 5]).unwrap_err();
    assert!(matches!(&short, CodebookError::Dimension { expected: 6, found: 5, .. }));
    assert!(short.to_string().contains("u/1"), "{short}");
    for value in [f32::NAN, f32::INFINITY] {
        let mut embedding = [1.0; 6];
        embedding[4] = value;
        let error = codebook.code(&id, &embedding).unwrap_err().to_string();
        assert!(error.contains("u/1 holds NaN or infinity"), "{error}");
    }
}

#[test]
fn a_stored_codebook_is_the_same_and_a_changed_one_is_refused() {
    let sample = embeddings(1, 60, 8, 6);
    let codebook = fitted(&sample, &IdsConfig { levels: 2, codebooks: 2, ..config(5) }, None);
    let bytes = codebook.to_bytes().unwrap();
    let read = Codebook::from_bytes("c", &bytes).unwrap();
    for place in 0..4 {
        assert_eq!(read.centroids(place), codebook.centroids(place));
    }
    assert_eq!(read.info().places(), 4);
    assert_eq!(churn(&codebook, &read, &same(&sample)).to_bits(), 0.0_f64.to_bits());
    let check = |bytes: &[u8], at: usize| {
        let error = Codebook::from_bytes("c.safetensors", bytes).unwrap_err().to_string();
        assert!(error.contains("c.safetensors: not a codebook"), "byte {at}: {error}");
    };
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        // A space of the header's padding may become another character that JSON ends before; nothing else may pass.
        if Codebook::from_bytes("c", &changed).is_ok_and(|read| read == codebook) {
            continue;
        }
        check(&changed, at);
    }
    check(&bytes[..bytes.len() - 1], bytes.len());
    check(b"", 0);
}

fn points(rows: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Vec<f32>>> {
    let point = prop::collection::vec(-8_i8..8, 6);
    let rows = prop::collection::vec(point, rows);
    rows.prop_map(|rows| rows.into_iter().map(|row| row.into_iter().map(f32::from).collect()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..Default::default() })]

    #[test]
    fn ids_are_of_the_nearest_centroids(sample in points(6..40), seed in 0_u64..4, is_scaled: bool) {
        let config = IdsConfig { normalise: is_scaled, levels: 2, codebooks: 2, seed, ..config(5) };
        let codebook = fitted(&sample, &config, None);
        for embedding in &sample {
            let norm = embedding.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            let scale = if is_scaled && norm > 0.0 { norm } else { 1.0 };
            let mut rest: Vec<f64> = embedding.iter().map(|v| f64::from(*v) / scale).collect();
            for (place, id) in ids(&codebook, embedding).into_iter().enumerate() {
                let rest = &mut rest[place / 2 * 3..][..3];
                let centroids: Vec<&[f32]> = codebook.centroids(place).chunks(3).collect();
                let distance = |c: &[f32]| -> f64 {
                    c.iter().zip(rest.iter()).map(|(c, v)| (f64::from(*c) - v).powi(2)).sum()
                };
                let own = centroids[usize::try_from(id).unwrap()];
                let least = centroids.iter().map(|c| distance(c)).fold(f64::INFINITY, f64::min);
                prop_assert!(distance(own) <= least + 1e-5, "place {place}: {} > {least}", distance(own));
                for (value, centroid) in rest.iter_mut().zip(own) {
                    *value -= f64::from(*centroid);
                }
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_codebook(sample in points(6..40), seed in 0_u64..4) {
        let config = IdsConfig { seed, levels: 2, ..config(5) };
        prop_assert_eq!(fitted(&sample, &config, None), fitted(&sample, &config, None));
    }

    #[test]
    fn errors_never_rise_from_level_to_level(sample in points(6..40)) {
        let codebook = fitted(&sample, &IdsConfig { levels: 3, ..config(4) }, None);
        let info = codebook.info();
        prop_assert!(info.inertia[0] <= info.variance + 1e-6, "{:?}", info);
        prop_assert!(info.inertia.is_sorted_by(|a, b| *b <= a + 1e-6), "{:?}", info.inertia);
    }
}
