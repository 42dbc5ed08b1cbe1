//! Delta tables: what nights, reruns and retention leave in their logs, and what `laser verify` says of them.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::cycle::Nights;
use crate::{assert_contains, assert_exit, assert_prints, assert_refused, entries, stdout};

const TABLE: &str = "output.table=delta";

/// The log of the table of users.
fn log(nights: &Nights) -> PathBuf {
    nights.workspace.path("out/profiles/kind=user/_delta_log")
}

/// The actions of a kind in each commit.
fn commits(nights: &Nights, action: &str) -> Vec<Vec<Value>> {
    let mut files = entries(&log(nights));
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    let actions = |file: PathBuf| {
        let lines = fs::read_to_string(file).unwrap();
        let actions = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        actions.filter_map(|line| line.get(action).cloned()).collect()
    };
    files.into_iter().map(actions).collect()
}

/// How many parts enter and leave with each commit, the empty table's left out.
fn changes(nights: &Nights) -> Vec<(usize, usize)> {
    let (added, removed) = (commits(nights, "add"), commits(nights, "remove"));
    added.iter().zip(&removed).skip(1).map(|(added, removed)| (added.len(), removed.len())).collect()
}

#[track_caller]
fn assert_agrees(nights: &Nights) {
    assert_prints(&nights.workspace.verify(), &["agrees: the table profiles/kind=user"]);
}

#[test]
fn a_night_killed_between_its_commit_and_success_is_published_once() {
    let nights = Nights::new();
    nights.night(1, &[TABLE]);
    for name in ["_SUCCESS", "_manifest.json"] {
        fs::remove_file(nights.published(1)[0].join(name)).unwrap();
    }
    nights.night(1, &[TABLE]);
    nights.night(1, &[TABLE]);
    assert_eq!(changes(&nights), [(4, 0)]);
    assert_eq!(commits(&nights, "txn").concat().len(), 1);
    assert_agrees(&nights);
}

#[test]
fn nights_enter_replace_each_other_and_leave_by_commits() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    nights.night(2, &[TABLE]);
    assert_eq!(changes(&nights), [(8, 0)], "with the night from before the table");
    let shorter = [TABLE, "generate.max_new_tokens=12"];
    nights.night(2, &shorter);
    nights.night(2, &[TABLE]);
    assert_eq!(
        changes(&nights)[1..],
        [(4, 4)],
        "the later run replaces the other one, which is complete and stays out"
    );
    assert_agrees(&nights);
    nights.write_users("Brazil");
    nights.night(3, &[TABLE, "output.keep_nights=2"]);
    assert_eq!(changes(&nights)[2..], [(4, 0), (0, 4)], "prune commits before it deletes");
    assert!(!nights.workspace.path("out/profiles/kind=user/dt=2026-01-01").exists());
    assert_agrees(&nights);
}

#[test]
fn the_same_command_with_the_key_makes_the_table_of_a_published_night() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.night(1, &[TABLE]);
    assert_eq!(changes(&nights), [(4, 0)]);
    assert_agrees(&nights);
}

#[test]
fn verify_finds_a_night_that_its_table_lacks() {
    let nights = Nights::new();
    nights.night(1, &[TABLE]);
    fs::remove_file(log(&nights).join("00000000000000000001.json")).unwrap();
    let verified = nights.workspace.verify();
    assert_exit(&verified, 65);
    assert_contains(&stdout(&verified), &["DISAGREES", "complete, but not in the table"]);
}

#[test]
fn a_table_wants_embeddings_as_lists() {
    let nights = Nights::new();
    let refused = nights.command("run", 1, &[TABLE, "encoder.path=models/bert"]).output().unwrap();
    assert_refused(&refused, &["[encoder] layout", "\"list\""]);
}
