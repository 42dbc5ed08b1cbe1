//! Of several runs of a night one is in force: for readers, for the next night, and in the Delta table.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cycle::Nights;
use crate::{assert_contains, assert_exit, assert_prints, assert_refused, entries, flip_bit, read_json, stdout};

const SHORTER: &str = "generate.max_new_tokens=12";

fn name(run: &Path) -> String {
    run.file_name().unwrap().to_str().unwrap().strip_prefix("run=").unwrap().to_owned()
}

/// The published folders of a night's runs, without its promotions.
fn runs(nights: &Nights, day: u32) -> Vec<PathBuf> {
    let mut runs = nights.published(day);
    runs.retain(|folder| folder.file_name().unwrap().to_str().unwrap().starts_with("run="));
    runs
}

/// Two runs of the second night: the one that was made first, and the one that was made later.
fn two_runs(settings: &[&str]) -> (Nights, String, String) {
    let nights = Nights::new();
    nights.night(1, settings);
    nights.write_users("Alien");
    nights.night(2, settings);
    let first = name(&runs(&nights, 2)[0]);
    nights.night(2, &[settings, &[SHORTER]].concat());
    let later = runs(&nights, 2).iter().map(|run| name(run)).find(|run| *run != first).unwrap();
    (nights, first, later)
}

/// The run that readers get of a night of users.
fn told(nights: &Nights, day: u32) -> Value {
    let in_force: Value = read_json(&nights.workspace.path("out/profiles/kind=user/_in_force.json"));
    let of_night = |night: &&Value| night["dt"] == format!("2026-01-{day:02}");
    in_force.as_array().unwrap().iter().find(of_night).map_or(Value::Null, |night| night["run"].clone())
}

#[test]
fn readers_and_the_next_night_get_the_promoted_run() {
    let (nights, first, later) = two_runs(&[]);
    assert_eq!(told(&nights, 2), later);
    let promoted = nights.laser(&["outputs", "promote", &first], &[]);
    assert_prints(&promoted, &[&format!("profiles of users on 2026-01-02: {first} is in force (promotion 1)")]);
    assert_eq!(told(&nights, 2), first);
    let listed = stdout(&nights.laser(&["outputs", "list"], &[]));
    let line = |run: &str| listed.lines().find(|line| line.contains(run)).unwrap();
    assert_contains(line(&first), &["profiles", "user", "12", "yes, promotion 1", "strict"]);
    assert_contains(line(&later), &[" no "]);
    // Another run of the night that is published afterwards does not take its place.
    nights.night(2, &["generate.max_new_tokens=9"]);
    assert_eq!(told(&nights, 2), first);
    nights.write_users("Brazil");
    nights.night(3, &[]);
    let third = nights.workspace.path("out/runs").join(name(&runs(&nights, 3)[0]));
    let pins: Value = read_json(&third.join("pins.json"));
    assert_eq!(pins["previous"], json!([format!("profiles/kind=user/dt=2026-01-02/run={first}")]));
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn a_rollback_returns_to_the_run_in_force_before() {
    let (nights, first, later) = two_runs(&[]);
    let outputs = |command: &str, run: &str| nights.laser(&["outputs", command, run], &[]);
    for run in [&first, &later] {
        assert_exit(&outputs("promote", run), 0);
    }
    // It is in force already, which is no other promotion.
    assert_prints(&outputs("promote", &later), &["promotion 2"]);
    assert_prints(&outputs("rollback", &later), &[&format!("{first} is in force (promotion 3)")]);
    assert_eq!(told(&nights, 2), first);
    // Before the first promotion the run counted that was made later.
    assert_prints(&outputs("rollback", &first), &[&format!("{later} is in force (promotion 4)")]);
    assert_eq!(told(&nights, 2), later);
    assert_refused(&outputs("rollback", &later), &["is not promoted", "laser outputs list"]);
    let listed = stdout(&nights.laser(&["outputs", "list", "--json"], &[]));
    let listed: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let states: Vec<_> = listed.iter().map(|run| (run["run"].as_str().unwrap(), &run["state"])).collect();
    assert!(states.contains(&(&later, &json!("newest"))) && states.contains(&(&first, &json!("superseded"))));
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn a_run_that_readers_must_not_get_is_not_promoted() {
    let (nights, first, later) = two_runs(&[]);
    let promote = |run: &str| nights.laser(&["outputs", "promote", run], &[]);
    let folder = |run: &str| nights.workspace.path(&format!("out/profiles/kind=user/dt=2026-01-02/run={run}"));
    flip_bit(&entries(&folder(&first)).into_iter().find(|file| file.ends_with("part-00000.parquet")).unwrap());
    assert_refused(&promote(&first), &["part-00000.parquet", "a damaged run is not promoted"]);
    fs::remove_file(folder(&later).join("_SUCCESS")).unwrap();
    assert_refused(&promote(&later), &["no _SUCCESS", "finish it"]);
    assert_refused(&promote("2026-01-02-0123456789ab"), &["has published nothing here", "laser outputs list"]);
    assert_refused(&promote("tonight"), &["not the name of a run"]);
    assert!(!nights.workspace.path("out/profiles/kind=user/dt=2026-01-02/_promotions").exists());
}

#[test]
fn a_night_takes_its_promotions_with_it() {
    let (nights, first, _) = two_runs(&[]);
    assert_exit(&nights.laser(&["outputs", "promote", &first], &[]), 0);
    for (day, film) in [(3, "Brazil"), (4, "Casablanca")] {
        nights.write_users(film);
        nights.night(day, &["output.keep_nights=2"]);
    }
    assert!(!nights.workspace.path("out/profiles/kind=user/dt=2026-01-02").exists());
    assert_eq!((told(&nights, 1), told(&nights, 2)), (Value::Null, Value::Null));
    assert_eq!(told(&nights, 3), name(&runs(&nights, 3)[0]));
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn verify_finds_a_list_of_runs_in_force_that_is_stale() {
    let (nights, first, later) = two_runs(&[]);
    let list = nights.workspace.path("out/profiles/kind=user/_in_force.json");
    let stale = fs::read(&list).unwrap();
    assert_exit(&nights.laser(&["outputs", "promote", &first], &[]), 0);
    // As a promotion that is killed halfway leaves it; the same command goes on.
    fs::write(&list, stale).unwrap();
    let verified = nights.workspace.verify();
    assert_exit(&verified, 65);
    assert_contains(&stdout(&verified), &["_in_force.json", "2026-01-02"]);
    assert_eq!(told(&nights, 2), later);
    assert_exit(&nights.laser(&["outputs", "promote", &first], &[]), 0);
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn a_rollback_that_is_killed_before_readers_are_told_is_repeated() {
    let (nights, first, later) = two_runs(&[]);
    let outputs = |command: &str, run: &str| nights.laser(&["outputs", command, run], &[]);
    assert_exit(&outputs("promote", &first), 0);
    let list = nights.workspace.path("out/profiles/kind=user/_in_force.json");
    let stale = fs::read(&list).unwrap();
    assert_exit(&outputs("rollback", &first), 0);
    fs::write(&list, stale).unwrap();
    assert_exit(&nights.workspace.verify(), 65);
    // The same promotion, and readers get what it restores.
    assert_prints(&outputs("rollback", &first), &[&format!("{later} is in force (promotion 2)")]);
    assert_eq!(told(&nights, 2), later);
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn the_table_follows_promotions_and_rollbacks() {
    let (nights, first, later) = two_runs(&["output.table=delta"]);
    let log = nights.workspace.path("out/profiles/kind=user/_delta_log");
    let is_commit = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "json");
    let newest = || fs::read_to_string(entries(&log).into_iter().rfind(is_commit).unwrap()).unwrap();
    let outputs = |command: &str, run: &str| assert_exit(&nights.laser(&["outputs", command, run], &[]), 0);
    let moves = |from: &str, to: &str| {
        let commit = newest();
        assert_contains(&commit, &["\"add\"", "\"remove\""]);
        let actions = commit.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        for action in actions {
            for (key, run) in [("add", to), ("remove", from)] {
                assert!(action[key]["path"].as_str().is_none_or(|path| path.contains(run)), "{action}");
            }
        }
        assert_exit(&nights.workspace.verify(), 0);
    };
    outputs("promote", &first);
    moves(&later, &first);
    let before = entries(&log).len();
    // It is there already, and a later run of the night does not replace it.
    outputs("promote", &first);
    nights.night(2, &["output.table=delta", "generate.max_new_tokens=9"]);
    assert_eq!(entries(&log).len(), before);
    outputs("promote", &later);
    moves(&first, &later);
    outputs("rollback", &later);
    moves(&later, &first);
}
