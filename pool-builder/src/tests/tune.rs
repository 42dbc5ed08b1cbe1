//! Tuning: which size is taken.

use laser_decode::Drafter;
use laser_schema::EntityId;

use super::*;
use crate::{Grouping, TuneConfig, TuneReport};

async fn tune(texts: Vec<PreviousText>, tune: TuneConfig) -> Result<TuneReport, String> {
    tune_with(json!({}), texts, tune).await
}

async fn tune_with(pools: serde_json::Value, texts: Vec<PreviousText>, tune: TuneConfig) -> Result<TuneReport, String> {
    let dir = tempfile::tempdir().unwrap();
    let tables = write_tables(dir.path());
    let tokenizer = tokenizer();
    let config = config(pools);
    let (texts, tokenizer) = (batches(texts, 100), pool_tokenizer(&tokenizer));
    crate::tune(&tables, texts, tokenizer, (&config, MEMORY), &tune, Drafter::default(), &mut quiet)
        .await
        .map_err(|e| e.to_string())
}

/// Texts of 20 words, each a pair of halves of which there are 15 × 15: only a large pool knows most.
fn alike() -> Vec<PreviousText> {
    let half = |number: usize| (0..10).map(move |i| format!("w{}", 2 + (number * 37 + i * i * 11) % 190));
    let text = |id: usize| PreviousText {
        runners_up: Vec::new(),
        record: None,
        kind: Kind::User,
        id: EntityId::Int(i64::try_from(id % 90).unwrap()),
        text: half(id % 15).chain(half(15 + id / 15 % 15)).collect::<Vec<_>>().join(" "),
    };
    (0..400).map(text).collect()
}

#[tokio::test]
async fn larger_pools_win_where_they_know_more() {
    let sizes = vec![1, 4, 200, 1000];
    let options = TuneConfig { sizes, held_out: 30, nodes: 16, step_us: 1e6 };
    let report = tune(alike(), options).await.unwrap();
    let users = &report.kinds[0];
    assert_eq!((report.kinds.len(), users.kind), (1, Kind::User));
    let group = &users.groups[0];
    assert_eq!(group.name, "user-all");
    let accepted: Vec<f64> = group.rows.iter().map(|row| row.accepted_per_step).collect();
    assert!(accepted[0] < accepted[1] && accepted[1] < accepted[2], "{accepted:?}");
    assert!(users.max_texts >= 200 && group.max_texts >= 200, "{users:?}");
    assert!(group.rows.iter().all(|row| row.held_out == 30 && row.draft_us > 0.0), "{group:?}");
    let texts: Vec<usize> = group.rows.iter().map(|row| row.pool_texts).collect();
    // The same text twice of one entity counts once.
    assert_eq!(texts[..3], [1, 4, 200]);
    assert!(texts[3] > 200 && texts[3] < 400, "{texts:?}");
}

#[tokio::test]
async fn groups_that_tell_nothing_of_the_texts_give_way_to_one_pool() {
    let ages = json!({"user": {"grouping": "attribute", "attributes": ["age"], "min_group": 5}});
    let options = TuneConfig { sizes: vec![5, 1000], held_out: 10, nodes: 16, step_us: 1e6 };
    let report = tune_with(ages, alike(), options).await.unwrap();
    let users = &report.kinds[0];
    let names: Vec<&str> = users.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["user-all", "user-age-18", "user-age-25", "user-age-35"]);
    let (groups, one) = (users.rows[1], users.one_pool[1]);
    // The group of everything has the texts of the others once more, and what one holds out another may have.
    assert!(one.pool_texts < groups.pool_texts && one.held_out == groups.held_out, "{users:?}");
    assert!(users.one_pool[0].accepted_per_step > users.rows[0].accepted_per_step, "{users:?}");
    assert_eq!((users.grouping, users.max_texts), (Grouping::Global, one.pool_texts));
}

#[tokio::test]
async fn texts_of_other_ids_cannot_be_grouped() {
    let texts: Vec<PreviousText> =
        alike().into_iter().map(|text| PreviousText { id: EntityId::Text(text.id.to_string()), ..text }).collect();
    let ages = json!({"user": {"grouping": "attribute", "attributes": ["age"]}});
    let error = tune_with(ages, texts.clone(), TuneConfig::default()).await.unwrap_err();
    assert!(error.contains("id_type") && error.ends_with("got 400 of other ids"), "{error}");
    assert_eq!(tune(texts, TuneConfig::default()).await.unwrap().kinds.len(), 1);
}

#[tokio::test]
async fn kinds_and_groups_are_told_apart() {
    let options = TuneConfig { sizes: vec![5, 10], held_out: 8, ..TuneConfig::default() };
    let report = tune(previous(), options).await.unwrap();
    let held_out: Vec<_> = report.kinds.iter().map(|k| (k.kind, k.rows[0].held_out)).collect();
    assert_eq!(held_out, [(Kind::User, 8), (Kind::Item, 8)]);
    assert_eq!(report.kinds[1].rows.len(), 2);
}

#[tokio::test]
async fn impossible_options_are_refused() {
    let default = TuneConfig::default;
    let cases = [
        (TuneConfig { sizes: vec![], ..default() }, "sizes must be rising numbers from 1, got []"),
        (TuneConfig { sizes: vec![5, 5], ..default() }, "sizes must be rising numbers from 1, got [5, 5]"),
        (TuneConfig { sizes: vec![0, 5], ..default() }, "sizes must be rising numbers from 1, got [0, 5]"),
        (TuneConfig { held_out: 0, ..default() }, "held_out must be at least 1, got 0"),
        (TuneConfig { nodes: 0, ..default() }, "nodes must be at least 1, got 0"),
        (TuneConfig { step_us: f64::NAN, ..default() }, "step_us must be a number above 0, got NaN"),
    ];
    for (options, message) in cases {
        assert_eq!(tune(alike(), options).await.unwrap_err(), format!("pools tune: {message}"));
    }
    let few = alike()[..4].to_vec();
    let error = tune(few, default()).await.unwrap_err();
    assert_eq!(error, "pools tune: previous texts must be at least 5 of one group, got 4 in all");
}
