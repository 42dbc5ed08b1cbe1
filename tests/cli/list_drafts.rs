//! `laser train draft --for recommendation`, and recommenders that learn from a table of sequences.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::lists::{items, model, untrained, users};
use crate::{Workspace, assert_prints, assert_refused, entries, laser, set};

/// A training that takes seconds.
const SMALL: [&str; 9] = [
    "recommender.draft.lists=5",
    "recommender.draft.model.max_items=4",
    "recommender.draft.model.hidden_size=16",
    "recommender.draft.model.intermediate_size=32",
    "recommender.draft.model.layers=1",
    "recommender.draft.model.heads=2",
    "recommender.draft.model.kv_heads=2",
    "recommender.draft.model.epochs=2",
    "recommender.draft.model.batch_tokens=64",
];

/// Trains a draft of the shared recommender into a folder of the workspace.
fn train(workspace: &Workspace, folder: &str, settings: &[&str]) -> Output {
    let target = format!("recommender.output={}", model().display());
    let output = format!("recommender.draft.output={}", workspace.path(folder).display());
    let mut command = laser();
    command.args(["train", "draft", "--for", "recommendation"]).arg(workspace.path("laser.toml"));
    command.args(set(&SMALL)).args(set(&[&target, &output])).args(set(settings)).output().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    entries(folder).iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_draft_of_lists_is_a_complete_model_that_is_found_again() {
    let workspace = untrained();
    let loss = |loss: &str| format!("recommender.draft.model.loss={loss}");
    for name in ["sft", "word-kd", "atspeed-s", "atspeed-r"] {
        assert_prints(&train(&workspace, name, &[&loss(name)]), &["a draft model for lists", "(kept)", "overlap"]);
    }
    // By default it learns by WordKD.
    assert_prints(&train(&workspace, "word-kd", &[]), &["complete already"]);
    let (draft, lists) = (|settings: &[&str]| train(&workspace, "draft", settings), loss("seq-kd"));
    assert_prints(&draft(&[&lists]), &["a draft model for lists", "(kept)", "overlap"]);
    let complete =
        ["config.json", "curves.svg", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json"];
    assert_eq!(names(&workspace.path("draft")), complete);
    assert_prints(&draft(&[&lists]), &["a draft model for lists, complete already"]);
    assert_refused(&draft(&[&lists, "recommender.draft.alpha=0.25"]), &["of another training"]);
    // Lists that are not of this target and these histories are made anew, and whatever the batch they are the same.
    fs::create_dir(workspace.path("again")).unwrap();
    fs::write(workspace.path("again/lists.json"), r#"{"made_of":"of others","learned":[],"measured":[]}"#).unwrap();
    assert_prints(&train(&workspace, "again", &[&lists, "generate.batch=7"]), &["a draft model for lists"]);
    let [first, again] =
        ["draft", "again"].map(|name| fs::read(workspace.path(name).join("model.safetensors")).unwrap());
    assert!(first == again);
}

#[test]
fn what_no_draft_of_lists_can_be_trained_for_is_refused() {
    let workspace = untrained();
    let refuse = |settings: &[&str], words: &[&str]| {
        let settings = [&["recommender.draft.model.loss=seq-kd"], settings].concat();
        assert_refused(&train(&workspace, "draft", &settings), words);
    };
    let nowhere = format!("recommender.output={}", workspace.path("nowhere").display());
    refuse(&[&nowhere], &["[recommender] output", "nowhere: no recommender to draft for", "laser train recommender"]);
    let text_model = format!("recommender.output={}", crate::fixture().display());
    refuse(&[&text_model], &["no recommender to draft for"]);
    for (setting, words) in [
        ("recommender.draft.output=", ["[recommender.draft] output: not set", "give a folder"]),
        ("recommender.draft.alpha=0", ["[recommender.draft]", "alpha = 0: expected a share above 0"]),
        ("recommender.draft.list_items=6", ["[recommender.draft]", "list_items = 6: expected 1 to lists = 5"]),
        ("recommender.draft.model.layers=0", ["[recommender.draft.model]", "layers = 0: expected at least 1"]),
        ("recommender.draft.model.loss=atspeed", ["recommender.draft.model.loss", "atspeed-s"]),
        ("recommender.draft.model.layer=1", ["recommender.draft.model.layer", "did you mean \"layers\""]),
        ("recommender.draft.model.max_items=9", ["reads 4 items", "[recommender.draft.model] max_items = 9; lower it"]),
        ("recommender.model.loss=word-kd", ["[recommender.model] loss = \"word-kd\"", "[recommender.draft.model]"]),
    ] {
        refuse(&[setting], &words);
    }
    fs::write(workspace.path("items.jsonl"), items() + "{\"id\": 99, \"identifier\": [9, 0, 0]}\n").unwrap();
    let unknown = "items.jsonl, row 49: code \"<a_9>\" of item 99 is no token of the model; leave the item out";
    refuse(&[], &["[recommender] output", unknown]);
    fs::write(workspace.path("items.jsonl"), items().replace("[3,", "[2,")).unwrap();
    let others = "its codes are others than those of the identifiers: no item has <a_3>";
    refuse(&[], &["[recommender] output", others]);
    assert!(!workspace.path("draft").exists());
}

/// The histories of the input as sequences, with the latest items held out.
fn sequences() -> String {
    let row = |line: &str| {
        let user: Value = serde_json::from_str(line).unwrap();
        let history = user["history"].as_array().unwrap();
        let mut items: Vec<&Value> = history.iter().map(|step| &step["item"]).collect();
        let held_out = items.pop();
        json!({ "id": user["id"], "items": items, "held_out": [held_out] }).to_string() + "\n"
    };
    users(0).lines().map(row).collect()
}

#[test]
fn a_recommender_of_sequences_is_that_of_the_same_histories() {
    let workspace = untrained();
    let train = |name: &str, text: &str| {
        fs::write(workspace.path(name), text).unwrap();
        let settings = [
            format!("recommender.sequences={}", workspace.path(name).display()),
            format!("recommender.output={}", model().display()),
            "input=[]".to_owned(),
        ];
        let mut command = laser();
        command.args(["train", "recommender"]).arg(workspace.path("laser.toml"));
        command.args(set(&settings.each_ref().map(String::as_str))).output().unwrap()
    };
    assert_prints(&train("sequences.jsonl", &sequences()), &["a recommender, complete already"]);
    let divided_otherwise = sequences().replacen("\"held_out\":[", "\"held_out\":[0,", 1);
    assert_refused(&train("other.jsonl", &divided_otherwise), &["holds a recommender of another training"]);
    let error = train("none.jsonl", "{\"items\": [1, 2], \"held_out\": []}\n");
    assert_refused(&error, &["[recommender] sequences", "1 users with items of the catalogue, 0 of them"]);
    assert_refused(&train("wrong.csv", "items\n[1]\n"), &["[recommender] sequences", "no column \"held_out\""]);
}
