//! What models must find, and what they must not.

use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::*;

const USERS: u32 = 40;
const ROWS: u32 = 3000;

/// Impressions of ever new items, so that ids say nothing; the label is liked by chance or as `label` says.
fn data(label: impl Fn(u32, u32) -> bool) -> Data {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let impressions = (0..ROWS).map(|row| {
        let (user, item) = (rng.gen_range(0..USERS), row);
        Impression { user, item, label: label(user, item) != rng.gen_bool(0.1), time: f64::from(row) }
    });
    let cuts = [f64::from(ROWS) * 0.7, f64::from(ROWS) * 0.85];
    Data::new(ROWS as usize, impressions.collect(), &vec![cuts; USERS as usize]).unwrap()
}

fn config() -> TrainingConfig {
    TrainingConfig {
        history: 5,
        dimension: 8,
        hidden: vec![16],
        batch: 128,
        learning_rate: 0.005,
        epochs: 12,
        ..TrainingConfig::default()
    }
}

/// Random bits by entity.
fn signs(entities: u32, seed: u64) -> Vec<bool> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..entities).map(|_| rng.r#gen()).collect()
}

/// Vectors of noise but for the first value, which is a bit.
fn vectors(bits: &[bool]) -> Feature {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(9);
    let row = |&bit: &bool| {
        let first = if bit { 1.0 } else { -1.0 };
        let noise = (0..7).map(|_| rng.gen_range(-1.0..1.0));
        Some(std::iter::once(first).chain(noise).collect())
    };
    Feature::Vectors(Vectors::new(8, &bits.iter().map(row).collect::<Vec<_>>()))
}

fn codes(bits: &[bool]) -> Feature {
    let rows: Vec<_> = bits.iter().map(|&bit| Some(vec![i64::from(bit) * 7])).collect();
    Feature::Codes(Codes::new(&rows).unwrap())
}

fn variant(user: Option<Feature>, item: Option<Feature>) -> Variant {
    Variant { name: "knowledge".into(), user, item }
}

fn aucs(data: &Data, variants: &[Variant]) -> Vec<f64> {
    let models = [ModelKind::Din, ModelKind::DcnV2];
    let runs = evaluate(data, &models, variants, &[1], &config(), 2, &|_| {}).unwrap();
    runs.iter().map(|run| run.auc).collect()
}

#[test]
fn knowledge_that_decides_the_label_is_found_in_vectors_and_in_codes() {
    let bits = signs(ROWS, 2);
    let data = data(|_, item| bits[item as usize]);
    let variants = [variant(None, None), variant(None, Some(vectors(&bits))), variant(None, Some(codes(&bits)))];
    for found in aucs(&data, &variants).chunks(3) {
        assert!(found[0] < 0.6, "{found:?}");
        // A tenth of the labels is turned, so that the best possible is about 0.9.
        assert!(found[1] > 0.85 && found[2] > 0.85, "{found:?}");
    }
}

#[test]
fn knowledge_that_only_matters_in_pairs_is_found() {
    let (of_users, of_items) = (signs(USERS, 3), signs(ROWS, 4));
    let data = data(|user, item| of_users[user as usize] == of_items[item as usize]);
    let both = variant(Some(codes(&of_users)), Some(codes(&of_items)));
    for auc in aucs(&data, &[both]) {
        assert!(auc > 0.8, "{auc}");
    }
}

#[test]
fn noise_is_no_gain() {
    let bits = signs(ROWS, 2);
    let data = data(|user, _| user % 2 == 0);
    let noise = signs(ROWS, 77);
    assert_ne!(bits, noise);
    let variants = [variant(None, None), variant(None, Some(vectors(&noise)))];
    for found in aucs(&data, &variants).chunks(2) {
        assert!(found[0] > 0.8, "{found:?}");
        assert!(found[1] < found[0] + 0.02, "{found:?}");
    }
}

#[test]
fn a_seed_decides_everything_whatever_the_threads() {
    let data = data(|user, _| user % 2 == 0);
    let variants = [variant(None, None)];
    let models = [ModelKind::Din, ModelKind::DcnV2];
    let run = |threads| evaluate(&data, &models, &variants, &[1, 2], &config(), threads, &|_| {}).unwrap();
    let (alone, together) = (run(1), run(4));
    assert_eq!(alone, together);
    assert_ne!(alone[0].log_loss, alone[1].log_loss);
}

fn impression(user: u32, item: u32, label: bool, time: f64) -> Impression {
    Impression { user, item, label, time }
}

#[test]
fn a_history_is_what_was_before() {
    let rows = vec![
        impression(1, 4, true, 1.0),
        impression(0, 3, true, 30.0),
        impression(0, 1, true, 10.0),
        impression(0, 2, false, 20.0),
        impression(0, 0, false, 20.0),
        impression(0, 4, true, 20.0),
        impression(0, 5, false, 40.0),
        impression(1, 1, false, 2.0),
        impression(1, 2, true, 50.0),
    ];
    let data = Data::new(6, rows, &[[25.0, 35.0], [25.0, 35.0]]);
    // The validation part has one label only.
    let error = data.unwrap_err().to_string();
    assert!(error.contains("all 1 interactions of the validation part are positive"), "{error}");
    let rows = vec![
        impression(0, 3, true, 30.0),
        impression(0, 1, true, 10.0),
        impression(0, 2, false, 20.0),
        impression(0, 0, false, 20.0),
        impression(0, 4, true, 20.0),
        impression(1, 4, true, 30.0),
        impression(1, 1, false, 31.0),
        impression(0, 5, false, 40.0),
        impression(1, 2, true, 50.0),
    ];
    let data = Data::new(6, rows, &[[25.0, 35.0], [25.0, 35.0]]).unwrap();
    let history = |position: usize, length| -> Vec<u32> {
        let seen = data.history(position, length);
        seen.iter().map(|seen| seen.item).collect()
    };
    // User 0 at 10, 20, 20, 20, 30, 40: what has the same time is not before.
    assert_eq!(history(0, 9), [0u32; 0]);
    for position in 1..4 {
        assert_eq!(history(position, 9), [1]);
    }
    assert_eq!(history(4, 9), [1, 2, 0, 4]);
    assert_eq!(history(5, 2), [4, 3]);
    // User 1 begins anew.
    assert_eq!(history(6, 9), [0u32; 0]);
    assert_eq!(history(8, 9), [4, 1]);
    // Item 5 and user 1 are not trained on.
    assert_eq!((data.item_token(5), data.user_token(1)), (0, 0));
    assert_eq!((data.item_token(4), data.user_token(0)), (5, 1));
    assert_eq!(data.known(Part::Test), [0.5, 0.5]);
}

#[test]
fn empty_parts_and_uneven_codes_are_refused() {
    let rows = vec![impression(0, 0, true, 1.0), impression(0, 0, false, 2.0)];
    let error = Data::new(1, rows, &[[9.0, 9.0]]).unwrap_err().to_string();
    assert!(error.contains("the validation part has no interactions"), "{error}");
    let error = Codes::new(&[Some(vec![1, 2]), None, Some(vec![1])]).unwrap_err().to_string();
    assert!(error.contains("entity 2 has 1 knowledge ids"), "{error}");
}

#[test]
fn vectors_are_standardised_over_those_there_are() {
    let rows = [Some(vec![1.0, 5.0]), None, Some(vec![3.0, 5.0])];
    let vectors = Vectors::new(2, &rows);
    assert_eq!(vectors.values, [-1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    assert_eq!(Feature::Vectors(vectors).known(), 2);
}
