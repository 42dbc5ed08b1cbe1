//! Texts at a temperature: drawn, and yet the same whatever makes them.

use std::collections::BTreeMap;
use std::fs;

use laser_schema::audit::{Audit, Proposer};
use laser_schema::job::Action;
use laser_schema::knowledge::RunnerUp;
use laser_store::part::decode_part;
use serde_json::Value;

use crate::distributed::{Cluster, Process};
use crate::faults::{start_and_kill, texts, without_run};
use crate::guards::plan;
use crate::{
    COMMON, TONIGHT, Workspace, assert_exit, assert_prints, assert_refused, entries, laser, only, read_json, stdout,
};

pub(crate) const DRAWN: [&str; 4] =
    ["generate.temperature=0.9", "generate.top_k=200", "generate.top_p=0.95", "generate.seed=7"];

/// The texts of both nights of the demo, with these settings as well.
fn drawn(settings: &[&str]) -> BTreeMap<(String, String), String> {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[&DRAWN, settings].concat()), 0);
    without_run(texts(&workspace))
}

#[test]
fn drawn_texts_depend_on_prompt_entity_and_seed_alone() {
    let expected = drawn(&[]);
    for same in [
        ["generate.batch=5", "draft.adaptive=false", "draft.nodes=3"],
        ["generate.step_tokens=40", "draft.method=prompt-lookup", "run.shard_rows=3"],
        ["generate.batch=1", "draft.method=none", "run.audit_share=0"],
    ] {
        assert_eq!(drawn(&same), expected, "{same:?}");
    }
    for other in ["generate.seed=8", "generate.temperature=0.5", "generate.top_p=0.3", "generate.top_k=1"] {
        assert_ne!(drawn(&[other]), expected, "{other}");
    }
}

#[test]
fn a_killed_run_goes_on_with_the_texts_that_it_would_have_drawn() {
    let expected = drawn(&[]);
    let killed = Workspace::new();
    for shards in [1, 3] {
        start_and_kill(killed.command("run", &DRAWN), shards);
    }
    assert_exit(&killed.run(&DRAWN), 0);
    assert_eq!(without_run(texts(&killed)), expected);
    assert_prints(&killed.run(&DRAWN), &["complete already"]);
}

#[test]
fn a_plan_that_does_not_tell_the_seed_is_refused_and_its_run_can_be_begun_anew() {
    let workspace = Workspace::with(&[TONIGHT]);
    start_and_kill(workspace.command("run", &DRAWN), 1);
    let run = only(&workspace.path("out/runs"));
    let mut plan: Value = read_json(&run.join("plan.json"));
    plan["spec"]["sampling"].as_object_mut().unwrap().remove("seed").unwrap();
    fs::write(run.join("plan.json"), plan.to_string()).unwrap();
    let parts = workspace.parts();
    let words = ["plan.json: not the plan of a run: missing field `seed`", "remove the run's folder to begin it anew"];
    assert_refused(&workspace.run(&DRAWN), &words);
    assert_eq!(workspace.parts(), parts);
    fs::remove_dir_all(run).unwrap();
    assert_exit(&workspace.run(&DRAWN), 0);
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn every_audited_text_of_a_strict_night_is_what_plain_sampling_draws() {
    let workspace = Workspace::new();
    let output = workspace.run(&[DRAWN.as_slice(), &["run.audit_share=1.0"]].concat());
    assert_prints(&output, &["100 % of the texts are the plain ones"]);
    let (mut audited, mut accepted) = (0, 0);
    for job in plan(&workspace).shards.iter().filter(|job| job.action == Action::Audit) {
        let audit: Audit = read_json(&workspace.path("out").join(&job.output));
        assert_eq!((audit.report.texts, audit.report.identical), (job.rows, job.rows));
        for pair in &audit.pairs {
            assert!(pair.identical && pair.relaxed == 0 && pair.text() == pair.plain, "{pair:?}");
            let proposed = pair.proposed.iter().filter(|(source, _)| **source != Proposer::Target);
            accepted += proposed.map(|(_, tokens)| tokens).sum::<u64>();
        }
        audited += audit.pairs.len();
    }
    assert!(audited > 0 && accepted > 0, "{audited} texts audited, {accepted} drafted tokens accepted");
}

#[test]
fn workers_draw_what_one_process_draws() {
    let expected = drawn(&[]);
    let cluster = Cluster::new("LASER_NATS_NEW");
    // Whether runners-up are kept is the plan's to say.
    let coordinator = cluster.coordinator(&[DRAWN.as_slice(), &["output.runners_up=2"]].concat());
    let workers = [(); 2].map(|()| cluster.start("worker", &[DRAWN.as_slice(), &["generate.batch=3"]].concat()));
    coordinator.assert_ends(0);
    workers.into_iter().for_each(|worker| drop(Process::terminate(worker)));
    assert_exit(&cluster.tonight.verify(), 0);
    assert!(runners_up(&cluster.tonight, "2026-01-02").values().all(|(_, kept)| kept.is_some()));
    let tonight = expected.into_iter().filter(|((folder, _), _)| folder.contains("dt=2026-01-02")).collect();
    assert_eq!(without_run(texts(&cluster.tonight)), tonight);
}

/// Of every row of a night its first text and the others.
fn samples(workspace: &Workspace, date: &str) -> BTreeMap<String, (String, Vec<String>)> {
    let mut samples = BTreeMap::new();
    for bytes in workspace.parts_of(date).into_values() {
        let (rows, info) = decode_part("part", bytes.into()).unwrap();
        samples
            .extend(rows.into_iter().map(|row| (format!("{} {}", info.kind, row.entity_id), (row.text, row.samples))));
    }
    assert!(!samples.is_empty());
    samples
}

#[test]
fn several_texts_of_an_entity_are_drawn_kept_and_carried() {
    let (one, several) = (Workspace::new(), Workspace::new());
    assert_exit(&one.run(&DRAWN), 0);
    let settings = [DRAWN.as_slice(), &["generate.samples=3"]].concat();
    assert_exit(&several.run(&settings), 0);
    let found = samples(&several, "2026-01-02");
    for (entity, (text, others)) in &found {
        // The first one is the one that is drawn alone.
        assert_eq!(*text, samples(&one, "2026-01-02")[entity].0, "{entity}");
        assert_eq!(others.len(), 2);
        assert!(others[0] != *text && others[1] != others[0], "{entity}: {text} {others:?}");
    }
    assert_exit(&several.verify(), 0);
    // Alone in a batch a text has no other to begin from.
    let alone = Workspace::new();
    assert_exit(&alone.run(&[settings.as_slice(), &["generate.batch=1"]].concat()), 0);
    assert_eq!(samples(&alone, "2026-01-02"), found);
    // The next night of the same tables.
    several.configure(&[COMMON, "[[previous]]\npath = \"latest\"\n", TONIGHT]);
    let next = several.run(&[settings.as_slice(), &["run.date=2026-01-03"]].concat());
    assert_prints(&next, &[&format!("{} unchanged", found.keys().filter(|id| id.starts_with("user")).count())]);
    assert_eq!(samples(&several, "2026-01-03"), found);
    assert_exit(&several.verify(), 0);
}

/// Of every row of a night its text and what is known of its runners-up.
fn runners_up(workspace: &Workspace, date: &str) -> BTreeMap<String, (String, Option<Vec<RunnerUp>>)> {
    let mut found = BTreeMap::new();
    for bytes in workspace.parts_of(date).into_values() {
        let (rows, info) = decode_part("part", bytes.into()).unwrap();
        found.extend(
            rows.into_iter().map(|row| (format!("{} {}", info.kind, row.entity_id), (row.text, row.runners_up))),
        );
    }
    found
}

/// Tokens in the pools of a night whose runners-up are known.
pub(crate) fn contested(workspace: &Workspace, date: &str) -> u64 {
    let mut sets = entries(&workspace.path("out/pools")).into_iter();
    let set = sets.find(|set| set.file_name().unwrap().to_str().unwrap().starts_with(date)).unwrap();
    let mut command = laser();
    command.args(["pools", "inspect", "--json"]).arg(workspace.path("laser.toml")).arg(set);
    let found: Value = serde_json::from_str(&stdout(&command.output().unwrap())).unwrap();
    found["pools"].as_array().unwrap().iter().map(|pool| pool["contested"].as_u64().unwrap()).sum()
}

#[test]
fn runners_up_are_kept_carried_and_drafted_from_and_change_no_text() {
    let (with, without) = (Workspace::new(), Workspace::new());
    // A table gains the column with the night that has it.
    let plain = [DRAWN.as_slice(), &["output.table=delta"]].concat();
    let settings = [plain.as_slice(), &["output.runners_up=2"]].concat();
    assert_exit(&without.run(&plain), 0);
    assert_exit(&with.run(&settings), 0);
    assert_exit(&with.verify(), 0);
    let found = runners_up(&with, "2026-01-02");
    for (entity, (text, kept)) in runners_up(&without, "2026-01-02") {
        assert_eq!((&found[&entity].0, kept), (&text, None), "{entity}");
        let kept = found[&entity].1.as_ref().unwrap();
        let races: Vec<&[RunnerUp]> = kept.chunk_by(|a, b| a.place == b.place).collect();
        assert!(
            !races.is_empty() && races.iter().all(|race| race.len() == 3 && race[0].probability < 0.95),
            "{kept:?}"
        );
    }
    assert_eq!(contested(&without, "2026-01-02"), 0);
    assert!(contested(&with, "2026-01-02") > 0, "the pools of the texts of the night before");
    // The next night of the same tables, with them, and of those that have none.
    for (workspace, expected) in [(&with, Some(&found)), (&without, None)] {
        workspace.configure(&[COMMON, "[[previous]]\npath = \"latest\"\n", TONIGHT]);
        assert_exit(&workspace.run(&[settings.as_slice(), &["run.date=2026-01-03"]].concat()), 0);
        assert_exit(&workspace.verify(), 0);
        for (entity, (text, kept)) in runners_up(workspace, "2026-01-03") {
            assert_eq!((&text, &kept), (&found[&entity].0, &expected.and_then(|found| found[&entity].1.clone())));
        }
    }
}

#[test]
fn a_typical_night_accepts_what_it_would_not_have_drawn() {
    let typical = ["verification.policy=typical", "verification.epsilon=0.05", "generate.temperature=1.0"];
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&typical), 0);
    // The first night's texts are drafts of each other and verified strictly; some of them are carried forward.
    assert_eq!(policies(&workspace, "2026-01-01"), BTreeMap::from([("strict".to_owned(), 0)]));
    let relaxed = policies(&workspace, "2026-01-02");
    assert!(relaxed["typical(epsilon=0.05,delta=0.3)"] > 0, "{relaxed:?}");
    assert_exit(&workspace.verify(), 0);
}

/// The rules that a night's texts were verified by, and the tokens that these relaxed.
fn policies(workspace: &Workspace, date: &str) -> BTreeMap<String, i64> {
    let mut found = BTreeMap::new();
    for bytes in workspace.parts_of(date).into_values() {
        for row in decode_part("part", bytes.into()).unwrap().0 {
            *found.entry(row.policy).or_default() += row.relaxed_tokens;
        }
    }
    found
}
