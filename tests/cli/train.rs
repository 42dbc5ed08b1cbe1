//! `laser train draft`: from the texts of nights to a draft model that the next night drafts with.

use std::fs;
use std::process::Output;

use crate::faults::{texts, without_run};
use crate::{Workspace, assert_exit, assert_prints, assert_refused, copy_files, fixture, laser, set};

/// A training that takes seconds.
const SMALL: [&str; 8] = [
    "train.hidden_size=16",
    "train.intermediate_size=32",
    "train.layers=1",
    "train.heads=2",
    "train.epochs=2",
    "train.batch_tokens=600",
    "train.held_out=0.2",
    "train.seed=3",
];

/// Trains on the workspace's nights, into the folder `draft`.
pub(crate) fn train(workspace: &Workspace, settings: &[&str]) -> Output {
    let output = format!("train.output={}", workspace.path("draft").display());
    let mut command = laser();
    command.args(["train", "draft"]).arg(workspace.path("laser.toml"));
    command.args(set(&SMALL)).args(set(&[output.as_str()])).args(set(settings));
    command.output().unwrap()
}

#[test]
fn a_draft_model_comes_of_published_texts_and_drafts_the_next_night() {
    let night = Workspace::new();
    assert_exit(&night.run(&[]), 0);
    let words = ["a draft model; use it with [draft.model] path", "overlap", "(kept)"];
    assert_prints(&train(&night, &[]), &words);
    let draft = night.path("draft");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "training.json", "curves.svg"] {
        assert!(draft.join(name).is_file(), "{name}");
    }
    assert!(!draft.join("checkpoint.safetensors").exists());
    let weights = fs::read(draft.join("model.safetensors")).unwrap();
    assert_prints(&train(&night, &[]), &["complete already"]);
    assert!(fs::read(draft.join("model.safetensors")).unwrap() == weights);
    assert_refused(&train(&night, &["train.loss=overlap"]), &["[train] output", "holds a draft model of another"]);

    let drafted = Workspace::new();
    let path = format!("draft.model.path={}", draft.display());
    assert_exit(&drafted.run(&[&path, "draft.method=none", "draft.adaptive=false"]), 0);
    assert_eq!(without_run(texts(&drafted)), without_run(texts(&night)));

    let other = night.path("other");
    copy_files(&fixture(), &other);
    let config = fs::read_to_string(other.join("config.json")).unwrap();
    fs::write(other.join("config.json"), config + "\n").unwrap();
    let model = format!("model.path={}", other.display());
    assert_refused(&drafted.run(&[&path, &model]), &["[draft.model] path", "was trained for the model"]);
}

#[test]
fn what_reads_the_models_features_drafts_the_next_night() {
    let night = Workspace::new();
    assert_exit(&night.run(&[]), 0);
    let plain = without_run(texts(&night));
    let draft = |kind: &str| format!("train.output={}", night.path(kind).display());
    for (kind, setting) in [("eagle", "train.passes=2"), ("medusa", "train.medusa_heads=2")] {
        let trained = train(&night, &[&format!("train.kind={kind}"), setting, &draft(kind)]);
        assert_prints(&trained, &["a draft model; use it", "at depth 2", "(kept)"]);
        let path = format!("draft.model.path={}", night.path(kind).display());
        for settings in
            [["draft.method=none", "draft.adaptive=false"], ["draft.adaptive=true", "generate.step_tokens=40"]]
        {
            let drafted = Workspace::new();
            assert_exit(&drafted.run(&[&path, settings[0], settings[1]]), 0);
            assert_eq!(without_run(texts(&drafted)), plain, "{settings:?}");
        }
        assert_prints(&night.output("doctor", &[&path]), &["draft model", "drafts from the model's features"]);
    }
    // A hub's cache has them under an id, without a tokenizer.
    let mut fetched = Workspace::new();
    let cached = fetched.path("hub/models--org--heads");
    fs::create_dir_all(cached.join("refs")).unwrap();
    fs::write(cached.join("refs/main"), "5e1f").unwrap();
    fs::create_dir(cached.join("snapshots")).unwrap();
    copy_files(&night.path("medusa"), &cached.join("snapshots/5e1f"));
    fetched.environment = vec![("HF_HOME", fetched.path("").display().to_string()), ("HF_HUB_OFFLINE", "1".into())];
    assert_exit(&fetched.run(&["draft.model.path=org/heads", "draft.method=none", "draft.adaptive=false"]), 0);
    assert_eq!(without_run(texts(&fetched)), plain);
    let other = night.path("other");
    copy_files(&fixture(), &other);
    let config = fs::read_to_string(other.join("config.json")).unwrap();
    fs::write(other.join("config.json"), config + "\n").unwrap();
    let heads = format!("draft.model.path={}", night.path("medusa").display());
    let model = format!("model.path={}", other.display());
    let words = ["[draft.model] path", "was trained for the model"];
    assert_refused(&Workspace::new().run(&[&heads, &model]), &words);
    let narrow = night.path("narrow");
    copy_files(&night.path("eagle"), &narrow);
    let config = fs::read_to_string(narrow.join("config.json")).unwrap();
    fs::write(narrow.join("config.json"), config.replacen("\"vocab_size\": ", "\"vocab_size\": 1", 1)).unwrap();
    let narrow = format!("draft.model.path={}", narrow.display());
    assert_refused(&Workspace::new().run(&[&narrow]), &["[draft.model]", "vocab_size", "it is to draft for"]);
}

#[test]
fn an_acceptance_head_judges_the_draft_models_tokens() {
    let night = Workspace::new();
    assert_exit(&night.run(&[]), 0);
    assert_exit(&train(&night, &[]), 0);
    let draft = night.path("draft").display().to_string();
    let of_draft = format!("train.draft={draft}");
    let head = |folder: &str| format!("train.output={}", night.path(folder).display());
    let settings = ["train.kind=acceptance", of_draft.as_str()];
    let trained = train(&night, &[settings[0], settings[1], &head("head")]);
    assert_prints(&trained, &["an acceptance head; use it with [draft.model] acceptance_head", "draft model alone"]);
    assert!(night.path("head/acceptance_head.safetensors").is_file() && night.path("head/curves.svg").is_file());

    let model = format!("draft.model.path={draft}");
    let judged = format!("draft.model.acceptance_head={}", night.path("head").display());
    for settings in [["draft.method=none", "draft.adaptive=false"], ["draft.adaptive=true", "draft.model.forwards=2"]] {
        let drafted = Workspace::new();
        assert_exit(&drafted.run(&[&model, &judged, settings[0], settings[1]]), 0);
        assert_eq!(without_run(texts(&drafted)), without_run(texts(&night)), "{settings:?}");
    }
    assert_prints(&night.output("doctor", &[&model, &judged]), &["with an acceptance head"]);

    // Neither is it a draft model, nor the head of another.
    let other = Workspace::new();
    let as_model = format!("draft.model.path={}", night.path("head").display());
    assert_refused(&other.run(&[&as_model]), &["[draft.model] path", "an acceptance head, which drafts nothing"]);
    let fixture = format!("draft.model.path={}", std::path::absolute(fixture()).unwrap().display());
    let words = ["acceptance_head", "was trained for the draft model"];
    assert_refused(&other.run(&[&fixture, &judged]), &words);
    let none = format!("draft.model.acceptance_head={draft}");
    assert_refused(&other.run(&[&model, &none]), &["no acceptance_head.safetensors in it", "kind = \"acceptance\""]);
    assert_refused(&train(&night, &["train.kind=acceptance"]), &["[train] draft = \"\"", "acceptance"]);
    assert_refused(&train(&night, &[&of_draft]), &["[train] draft", "with no other"]);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let night = Workspace::new();
    assert_refused(&train(&night, &[]), &["[output] path", "no run with texts of [model] path", "run a night first"]);
    for (setting, words) in [
        ("train.output=", ["[train] output: not set", "give a folder"]),
        ("train.output=s3://bucket/draft", ["expected a local folder", "copy it to a store"]),
        ("train.heads=3", ["[train] heads = 3", "divides hidden_size = 16"]),
        ("train.held_out=0.9", ["[train] held_out = 0.9", "a share up to 0.5"]),
        ("train.passes=0", ["[train] passes = 0", "at least 1"]),
        ("train.medusa_heads=0", ["[train] medusa_heads = 0", "at least 1"]),
        ("train.epochs=0", ["[train] epochs = 0", "at least 1"]),
        ("train.loss=ce", ["train.loss", "cross-entropy"]),
        ("model.engine=mistralrs", ["[model] engine = \"mistralrs\"", "engine = \"tree\""]),
    ] {
        assert_refused(&train(&night, &[setting]), &words);
    }
}
