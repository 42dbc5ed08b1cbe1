//! What models must find, and what they must not.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::fields::BagSums;
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
    let features = |feature: Option<Feature>| feature.into_iter().map(Arc::new).collect();
    Variant { name: "knowledge".into(), features: [user, item].map(features) }
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
    let data = data(|user, _| user % 2 == 0);
    let variants = [variant(None, None), variant(None, Some(vectors(&signs(ROWS, 77))))];
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
fn empty_parts_constant_labels_and_uneven_codes_are_refused() {
    let rows = vec![impression(0, 0, true, 1.0), impression(0, 0, false, 2.0), impression(0, 0, true, 3.0)];
    for (validation_ends, expected) in [
        (2.5, "the validation part has no interactions"),
        (9.0, "all 1 interactions of the validation part are positive"),
    ] {
        let error = Data::new(1, rows.clone(), &[[2.5, validation_ends]]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
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

/// Users who like one of two kinds of items, over few items, so that ids say much about those that are trained on.
fn tastes(items: u32, kinds: &[bool]) -> Vec<Impression> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut rows = Vec::new();
    for user in 0..60 {
        for item in 0..items {
            if rng.gen_bool(0.4) {
                let label = (kinds[item as usize] == (user % 2 == 0)) != rng.gen_bool(0.1);
                rows.push(impression(user, item, label, 0.0));
            }
        }
    }
    rows
}

fn item_split(seed: u64) -> ItemSplit {
    ItemSplit { share: 0.3, train: 0.8, validation: 0.9, seed }
}

#[test]
fn histories_of_a_split_by_item_hold_other_training_items_alone() {
    let kinds = signs(80, 6);
    let data = Data::by_item((60, 80), tastes(80, &kinds), &item_split(3)).unwrap();
    let training: std::collections::HashSet<(u32, u32)> =
        data.positions(Part::Train).iter().map(|&p| data.impression(p)).map(|i| (i.user, i.item)).collect();
    let (mut seen_in_training, mut cold) = (0, 0);
    for part in Part::ALL {
        for &position in data.positions(part) {
            let impression = *data.impression(position);
            let history = data.history(position, 5);
            for seen in &history {
                assert_eq!(seen.user, impression.user);
                assert_ne!(seen.item, impression.item);
                assert!(training.contains(&(seen.user, seen.item)), "{part:?}: {seen:?} is held out");
            }
            let distinct: std::collections::HashSet<u32> = history.iter().map(|seen| seen.item).collect();
            assert_eq!(distinct.len(), history.len());
            seen_in_training += usize::from(part == Part::Train && history.len() == 5);
            cold += usize::from(part == Part::Test && data.item_count(impression.item) == 0);
            assert_eq!(data.item_token(impression.item) > 0, data.item_count(impression.item) > 0);
        }
    }
    assert!(seen_in_training > 800 && cold > 400, "{seen_in_training}, {cold}");
    // The seed chooses the items.
    let items = |seed| -> Vec<bool> {
        let data = Data::by_item((60, 80), tastes(80, &kinds), &item_split(seed)).unwrap();
        (0..80).map(|item| data.item_count(item) == 0).collect()
    };
    assert_eq!(items(3), items(3));
    assert_ne!(items(3), items(4));
    // 24 test and 12 validate.
    assert_eq!(items(3).iter().filter(|cold| **cold).count(), 36);
}

#[test]
fn texts_win_on_new_items_and_shuffled_texts_do_not() {
    let kinds = signs(240, 6);
    let mut shuffled = kinds.clone();
    rand::seq::SliceRandom::shuffle(shuffled.as_mut_slice(), &mut Xoshiro256PlusPlus::seed_from_u64(8));
    let data = Data::by_item((60, 240), tastes(240, &kinds), &item_split(1)).unwrap();
    let bags: Vec<Vec<String>> = kinds.iter().map(|kind| vec![kind.to_string(), "film".to_owned()]).collect();
    let features = [vectors(&kinds), codes(&kinds), Feature::Bags(Bags::of_values(&bags).into()), vectors(&shuffled)];
    let variants: Vec<Variant> =
        std::iter::once(variant(None, None)).chain(features.map(|feature| variant(None, Some(feature)))).collect();
    let config = TrainingConfig { content_in_history: true, item_id_dropout: Some(0.3), ..config() };
    let runs = evaluate(&data, &[ModelKind::Din, ModelKind::DcnV2], &variants, &[1], &config, 2, &|_| {}).unwrap();
    for runs in runs.chunks(variants.len()) {
        let of = |group: usize| -> Vec<f64> { runs.iter().map(|run| run.groups[group].auc.unwrap()).collect() };
        let (cold, warm) = (of(0), of(1));
        let model = runs[0].model.as_str();
        // A tenth of the labels is turned, so that the best possible is about 0.9.
        assert!(cold[1..4].iter().all(|auc| *auc > 0.8), "{model}, cold: {cold:?}");
        assert!(cold[0] < 0.6 && cold[4] < 0.65, "{model}, cold: {cold:?}");
        assert!(warm[1..4].iter().all(|auc| *auc > 0.8), "{model}, warm: {warm:?}");
        let impressions = |group: usize| runs[0].groups[group].impressions;
        assert_eq!(impressions(1), (2..5).map(impressions).sum::<usize>());
    }
}

#[test]
fn values_of_one_entity_alone_are_no_feature() {
    let rows = [vec!["a", "b", "a"], vec!["b"], vec!["c"], vec![]];
    let bags = Bags::of_values(&rows.map(|row| row.into_iter().map(str::to_owned).collect()));
    assert_eq!((0..4).map(|entity| bags.bag(entity)).collect::<Vec<_>>(), [&[(0, 1.0)][..], &[(0, 1.0)], &[], &[]]);
    assert_eq!((bags.vocabulary, Feature::Bags(bags.into()).known()), (1, 2));
}

#[test]
fn words_of_a_text_weigh_by_tf_idf() {
    let texts = ["A cult film, a CULT film!", "The cult of film", "film: cult", "of film", "'film'"];
    let texts: Vec<Option<String>> = texts.map(|text| Some(text.to_owned())).into_iter().chain([None]).collect();
    let bags = Bags::of_texts(&texts);
    // "cult" is in three of five texts; "film" in all, which tells nothing; the others in fewer than three.
    assert_eq!(bags.vocabulary, 2);
    for (entity, expected) in [(0, vec![(0, 1.0), (1, 0.0)]), (3, vec![(1, 0.0)]), (5, vec![])] {
        assert_eq!(bags.bag(entity), expected, "{entity}");
    }
}

#[test]
fn gradients_of_bags_are_those_of_a_dense_product() {
    let rows = [vec!["a", "b"], vec!["b", "c", "a"], vec![], vec!["c"]];
    let bags = Arc::new(Bags::of_values(&rows.map(|row| row.into_iter().map(str::to_owned).collect())));
    let mut dense = vec![0f32; 3 * 3];
    let entities = vec![1, 3, 1];
    for (row, &entity) in entities.iter().enumerate() {
        bags.bag(entity as usize).iter().for_each(|(token, weight)| dense[row * 3 + *token as usize] = *weight);
    }
    let cpu = &candle_core::Device::Cpu;
    let table = candle_core::Var::from_vec((0u8..6).map(f32::from).collect(), (3, 2), cpu).unwrap();
    let dense = candle_core::Tensor::from_vec(dense, (3, 3), cpu).unwrap().matmul(&table).unwrap();
    let sums = table.apply_op1(BagSums { bags, entities }).unwrap();
    let gradient = |of: &candle_core::Tensor| {
        let loss = of.sqr().unwrap().sum_all().unwrap();
        loss.backward().unwrap().get(&table).unwrap().to_vec2::<f32>().unwrap()
    };
    assert_eq!(sums.to_vec2::<f32>().unwrap(), dense.to_vec2::<f32>().unwrap());
    assert_eq!(gradient(&sums), gradient(&dense));
}
