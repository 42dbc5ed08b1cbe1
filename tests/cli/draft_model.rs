//! A second model drafts: nights have the same texts, and say who proposed them.

use std::fs;

use laser_schema::audit::{Audit, Proposer};
use laser_schema::job::Action;

use crate::distributed::{Cluster, Process};
use crate::faults::{texts, without_run};
use crate::guards::plan;
use crate::{Workspace, assert_exit, assert_refused, copy_files, read_json};

/// The settings that make the fixture draft for itself.
fn drafted() -> [String; 2] {
    let fixture = std::path::absolute("fixtures/profile-lm").unwrap();
    [format!("draft.model.path={}", fixture.display()), "draft.model.forwards=2".to_owned()]
}

#[test]
fn strict_nights_have_the_same_texts_with_a_draft_model() {
    let plain = Workspace::new();
    assert_exit(&plain.run(&[]), 0);
    let [path, forwards] = drafted();
    for settings in [
        ["draft.adaptive=true", "run.audit_share=0.5"],
        ["draft.method=none", "draft.adaptive=false"],
        ["draft.method=prompt-lookup", "draft.nodes=3"],
    ] {
        let night = Workspace::new();
        assert_exit(&night.run(&[&[path.as_str(), &forwards], settings.as_slice()].concat()), 0);
        assert_eq!(without_run(texts(&night)), without_run(texts(&plain)), "{settings:?}");
        assert_exit(&night.verify(), 0);
    }
}

#[test]
fn nights_draft_with_several_draft_models() {
    let plain = Workspace::new();
    assert_exit(&plain.run(&[]), 0);
    let fixture = std::path::absolute("fixtures/profile-lm").unwrap();
    let night = Workspace::new();
    let config = fs::read_to_string(night.path("laser.toml")).unwrap();
    let table = |forwards: usize| {
        format!("\n[[draft.model]]\npath = {:?}\nforwards = {forwards}\n", fixture.display().to_string())
    };
    fs::write(night.path("laser.toml"), config + &table(1) + &table(2)).unwrap();
    assert_exit(&night.run(&["draft.method=none", "draft.adaptive=false"]), 0);
    assert_eq!(without_run(texts(&night)), without_run(texts(&plain)));
    let wrong = fs::read_to_string(night.path("laser.toml")).unwrap().replacen("forwards = 2", "forward = 2", 1);
    fs::write(night.path("laser.toml"), wrong).unwrap();
    assert_refused(&night.run(&[]), &["draft.model", "did you mean \"forwards\"?"]);
}

#[test]
fn audits_name_the_draft_model_and_workers_have_it_too() {
    let [path, forwards] = drafted();
    let settings = [path.as_str(), &forwards, "draft.method=none", "draft.adaptive=false", "run.audit_share=1"];
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&settings);
    let worker = cluster.start("worker", &settings);
    coordinator.assert_ends(0);
    drop(Process::terminate(worker));
    let mut proposed = 0;
    for job in plan(&cluster.tonight).shards.iter().filter(|job| job.action == Action::Audit) {
        let audit: Audit = read_json(&cluster.tonight.path("out").join(&job.output));
        let pairs = audit.pairs.iter();
        proposed += pairs.filter_map(|pair| pair.proposed.get(&Proposer::DraftModel)).sum::<u64>();
    }
    assert!(proposed > 0);
}

#[test]
fn draft_models_that_cannot_draft_are_refused() {
    let mut night = Workspace::new();
    night.environment = vec![("HF_HUB_OFFLINE", "1".into())];
    let [path, _] = drafted();
    let none = "draft.model.path=nowhere/at-all";
    assert_refused(&night.run(&[none]), &["[draft.model] path", "nowhere/at-all"]);
    assert_refused(&night.run(&[&path, "draft.model.forwards=0"]), &["[draft.model] forwards = 0", "1 to 20"]);
    assert_refused(&night.run(&[&path, "draft.model.stop_threshold=1.5"]), &["stop_threshold = 1.5", "up to 1"]);
    assert_refused(&night.run(&[&path, "model.engine=mistralrs"]), &["[draft.model]", "mistralrs", "remove"]);
    assert_refused(&night.run(&[&path, "draft.method=lookahead"]), &["[draft.model]", "lookahead", "remove"]);
    let measured = night.run(&[&path, "draft.model.medusa_tree=measured"]);
    assert_refused(&measured, &["[draft.model] path", "medusa_tree = \"measured\"", "has none; remove medusa_tree"]);
    let other = night.path("other");
    copy_files(&std::path::absolute("fixtures/profile-lm").unwrap(), &other);
    let file = other.join("tokenizer.json");
    let tokenizer = fs::read_to_string(&file).unwrap();
    fs::write(&file, tokenizer.replacen("\"single_word\": false", "\"single_word\": true", 1)).unwrap();
    let other = format!("draft.model.path={}", other.display());
    assert_refused(&night.run(&[&other]), &["[draft.model] path", "its tokenizer is", "must have the tokenizer"]);
}
