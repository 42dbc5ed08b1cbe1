//! `laser-bench lists` on a night of a catalogue of 48 items and a recommender that has learnt for an epoch.

use std::fs;
use std::path::Path;

use laser_night::{Config, Night, recommender};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{Command, parse};
use crate::lists::{self, ListsReport};

const ITEMS: usize = 48;

/// Accepted steps of a list at most: one forward computes the prompt and all levels but the first.
const STEPS: f64 = 2.0;

const CONFIG: &str = r#"
[model]
path = "DIR/model"
[[input]]
path = "DIR/users.jsonl"
kind = "user"
[output]
path = "DIR/out"
[prompt]
user = "lists/codes"
max_history = 4
[generate]
batch = 3
[lists]
items = 5
draft = "auto"
[lists.catalogue]
path = "DIR/items.jsonl"
[recommender]
output = "DIR/model"
[recommender.model]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 2
max_items = 4
dropout = 0.0
epochs = 1
batch_tokens = 64
[run]
date = "2026-01-02"
audit_share = 0.0
"#;

/// Twenty users who go from each item to the one behind the next.
fn user(user: usize) -> String {
    let items = (0..4).map(|at| json!({ "item": (user * 7 + 2 * at) % ITEMS }));
    json!({ "id": format!("u{user}"), "history": items.collect::<Vec<_>>() }).to_string() + "\n"
}

/// Trains a recommender and makes the lists of two nights, of which the second makes shorter ones anew; three codes an
/// item.
async fn night(dir: &Path) {
    let item =
        |item: usize| json!({ "id": item, "identifier": [item % 4, item / 4 % 4, item / 16] }).to_string() + "\n";
    fs::write(dir.join("items.jsonl"), (0..ITEMS).map(item).collect::<String>()).unwrap();
    fs::write(dir.join("users.jsonl"), (0..20).map(user).collect::<String>()).unwrap();
    let path = dir.join("laser.toml");
    fs::write(&path, CONFIG.replace("DIR", dir.to_str().unwrap())).unwrap();
    let drain = CancellationToken::new();
    let trained = recommender::train(&Config::load_histories(&path, &[]).unwrap(), &mut (), &drain).await.unwrap();
    assert!(trained.is_some());
    let second = ["run.date=2026-01-03", "previous=[{path='latest'}]", "lists.items=4"].map(str::to_owned);
    for settings in [&[][..], &second] {
        let config = Config::load(&path, settings).unwrap();
        Night::open(&config).await.unwrap().run(&mut (), &drain).await.unwrap();
    }
}

async fn measure(dir: &Path, options: &str) -> anyhow::Result<ListsReport> {
    let [night, model] = ["out", "model"].map(|name| dir.join(name).display().to_string());
    let line = format!("lists {night} --model {model} --draft itself={model} --nodes 16 {options}");
    let Ok(Command::Lists(args)) = parse(&line) else { unreachable!("the command is lists: {line}") };
    lists::run(&args).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_draft_makes_the_lists_of_plain_search() {
    let dir = tempfile::tempdir().unwrap();
    night(dir.path()).await;
    let options = "--items 1,4 --batches 1,3 --drafted 16 --users 12 --warm-up 4 --rounds 2 --temperature 1";
    let report = measure(dir.path(), options).await.unwrap();
    let text = report.render(laser_terminal::Style::Text);
    assert_eq!(report.settings.len(), 4, "{text}");
    for setting in &report.settings {
        let of = |name: &str| setting.rows.iter().find(|row| row.variant == name).unwrap_or_else(|| panic!("{text}"));
        assert!(setting.rows.iter().all(|row| row.lists == 12 && row.illegal == 0), "{text}");
        let is_lossless = |name: &str| !name.contains("relaxed") && !name.contains("published");
        assert!(setting.rows.iter().filter(|row| is_lossless(&row.variant)).all(|row| row.same == 12), "{text}");
        let plain = of("plain");
        assert_eq!((plain.accepted, plain.calls, plain.most_calls), (0.0, 3.0, 3), "{text}");
        // A fixed tree of 16 prefixes holds every continuation of four beams.
        let itself = of("itself, N 16, gamma 3");
        assert_eq!((itself.accepted, itself.most_calls), (STEPS, 1), "{text}");
        assert!(of("trie, completed").accepted > 0.0, "{text}");
        assert_eq!(of("listed, N 16, gamma 3, first night").accepted, STEPS, "{text}");
        let sources = ["listed", "popularity", "markov", "knn", "retrieval"];
        assert!(sources.iter().all(|source| of(&format!("{source}, N 16, gamma 3")).accepted == STEPS), "{text}");
        assert!(sources.iter().chain(&["auto"]).all(|source| of(&format!("{source}, adaptive")).lists == 12), "{text}");
    }

    let error = async |options: &str| format!("{:#}", measure(dir.path(), options).await.unwrap_err());
    let few = error("--users 20 --warm-up 4").await;
    assert!(few.contains("20 users are to be generated; --users and --warm-up ask for 24"), "{few}");
    let rounds = error("--rounds 1").await;
    assert!(rounds.contains("--rounds 1: expected at least 2"), "{rounds}");
}
