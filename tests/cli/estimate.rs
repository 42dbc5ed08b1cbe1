//! `laser plan --estimate`: what a night is expected to take, and what it took.

use std::fs;
use std::path::Path;

use laser_schema::estimate::Estimate;
use serde_json::{Value, json};

use crate::report::page;
use crate::{
    TONIGHT, USERS, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, lists, only,
    read_json,
};

/// More than a batch of users, so that some of them are in a sample and others are not.
fn workspace() -> Workspace {
    let night = "[run]\nshard_rows = 4\naudit_share = 0.5\ndate = \"2026-01-02\"\n[price]\ngpu_hour = 2.5\n";
    let workspace = Workspace::with(&[USERS, night]);
    let film = |number: u32| json!({"title": format!("Film {number}"), "rating": 4});
    let user = |id: u32| json!({"id": id, "history": [film(id % 5), film(7)]});
    let users: String = (0..24).map(|id| user(id).to_string() + "\n").collect();
    fs::write(workspace.path("users.jsonl"), users).unwrap();
    workspace
}

fn estimate(workspace: &Workspace) -> Estimate {
    read_json(&only(&workspace.path("out/runs")).join("estimate.json"))
}

#[test]
fn an_estimate_from_all_rows_knows_their_tokens() {
    let workspace = workspace();
    let mut command = workspace.command("plan", &[]);
    let told = command.args(["--estimate", "--workers", "2"]).output().unwrap();
    assert_prints(&told, &["Estimate from 24 rows", "audit of users", "Begun now, 2 workers would be done at"]);
    let before = estimate(&workspace);
    assert_eq!(entries(&workspace.path("out")).len(), 1, "nothing but the estimate is written");
    assert_prints(&workspace.run(&[]), &["24 entities, 24 generated"]);
    let after = estimate(&workspace);
    assert_eq!(before, after);
    let manifest: Value = read_json(&workspace.published("2026-01-02")[0].join("_manifest.json"));
    assert_eq!(manifest["run"], before.run.as_str());
    let tokens: f64 = manifest["figures"].as_object().unwrap().values().map(|f| f["tokens"].as_f64().unwrap()).sum();
    let [group] = &before.groups[..] else { panic!("one pool: {before:?}") };
    assert!(group.texts == 24 && (group.tokens.mean - tokens).abs() < 1e-6, "{group:?}, {tokens}");
    assert!(group.tokens.low <= tokens && tokens <= group.tokens.high);
    assert!(group.seconds.low > 0.0 && before.audits[0].1.mean > 0.0);
    let page = page(&workspace, &workspace.path("out"));
    assert_contains(&page, &["Estimate and outcome", "audit of users", "<td>1.00</td>"]);
}

#[test]
fn a_page_of_one_kind_compares_that_kind_with_its_estimate() {
    let workspace = Workspace::with(&[TONIGHT]);
    assert_exit(&workspace.command("plan", &[]).arg("--estimate").output().unwrap(), 0);
    assert_exit(&workspace.run(&[]), 0);
    let published = workspace.published("2026-01-02");
    let page_of = |folder: &Path| page(&workspace, folder);
    assert_contains(&page_of(&workspace.path("out")), &["audit of users", "audit of items"]);
    for (folder, own, other) in [(&published[0], "users", "items"), (&published[1], "items", "users")] {
        let page = page_of(folder);
        assert_contains(&page, &["Estimate and outcome", &format!("audit of {own}")]);
        assert!(!page.contains(&format!("audit of {other}")), "{other} were estimated, and this page has none");
    }
}

#[test]
fn a_sample_stands_for_the_other_rows() {
    let workspace = workspace();
    let sampled = |rows: &str, settings: &[&str]| {
        let mut command = workspace.command("plan", settings);
        let told = command.args(["--estimate", "--sample", rows]).output().unwrap();
        assert_prints(&told, &[&format!("Estimate from {rows} rows")]);
        estimate(&workspace)
    };
    let (few, again) = (sampled("8", &[]), sampled("8", &[]));
    // The same rows are drawn, and their texts are the same.
    assert_eq!(few.groups[0].tokens, again.groups[0].tokens);
    // All texts of this model are cut off at their bound of 24 tokens, so a sample of any size knows them.
    let more = sampled("20", &[]);
    for group in [&few.groups[0], &more.groups[0]] {
        assert!(group.texts == 24 && (group.tokens.mean - 576.0).abs() < 1e-6, "{group:?}");
    }
    let refused = workspace.command("plan", &[]).args(["--sample", "8"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--estimate"));
    assert_refused(&workspace.output("plan", &["generate.max_new_tokens=0"]), &["max_new_tokens"]);
}

#[test]
fn lists_are_estimated_in_seconds() {
    let workspace = lists::workspace();
    let mut command = workspace.command("plan", &["run.audit_share=0.2"]);
    assert_prints(&command.args(["--estimate", "--sample", "30"]).output().unwrap(), &["Estimate from 30 rows"]);
    let estimate = estimate(&workspace);
    let [group] = &estimate.groups[..] else { panic!("no pools: {estimate:?}") };
    assert!(group.texts == 60 && group.tokens.high == 0.0 && group.seconds.mean > 0.0, "{group:?}");
}
